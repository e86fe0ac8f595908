"""A rank of `fsl-node --role client --ranks N`, one of the client's gang: torchrun runs it N times.

A rank imports what trains in `main`, so that its errors reach the node too. With arguments the
module is torchrun itself, without its own tracebacks and warnings: ranks' errors are printed by
themselves, and the exit code of a rank that died by torchrun.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from fsl_async.errors import FslError, describe, one_line
from fsl_async.learn.gang.link import ADDRESS, ERRORS, Place

if TYPE_CHECKING:
    from fsl_async.nodes.client.gang_joining import RankSession


def main() -> int:
    """Train as one rank, until the node lets it go. Returns the exit code."""
    try:
        return _rank()
    except Exception as error:
        _keep(error)
        raise


def _rank() -> int:
    from fsl_async.nodes.client.gang_joining import RankSession

    place = Place.here() or Place(0, 1, _generation(), 0, 1)
    session: RankSession | None = None
    try:
        session = RankSession(place, os.environ[ADDRESS])
        _train(session)
        session.training.serve()
    except FslError as error:
        if session is not None:
            session.failed(error)
        found = describe(error)
        sys.stderr.write(one_line(f"rank {place.rank}: {found.message}") + "\n")
        return found.exit_code or 1
    return 0


def _train(session: RankSession) -> None:
    import torch
    import torch.distributed as dist

    from fsl_async.learn.client.fed import Fed
    from fsl_async.learn.client.ports import RunFinishedError
    from fsl_async.learn.user_code import load_task, own_failure
    from fsl_async.nodes.client.joining import built_in, context_of, start_line
    from fsl_async.process.script import print_line

    try:
        options, member = session.wait_welcome()
        context = session.context(context_of(options, member, print_line))
        function = load_task(options.task) if options.task else built_in(member.config, options)
        context.log(start_line(context, options.threads))
        if context.device.type == "cuda":
            torch.cuda.set_device(context.device)
            dist.init_process_group("cpu:gloo,cuda:nccl", device_id=context.device)
        else:
            dist.init_process_group("gloo")
        fed = Fed(session.training, context)
        fed.evaluates_in_time = not options.task
        function(fed)
    except RunFinishedError:
        pass
    except FslError:
        raise
    except Exception as failure:  # torchrun starts the ranks again: it may have been the machine
        known = own_failure(failure)
        if known is None:
            raise
        _keep(known)
        sys.stderr.write(known.trace)
        raise SystemExit(1) from None


def _torchrun(arguments: list[str]) -> int:
    """Run torchrun. Returns the exit code."""
    import logging

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    try:
        torchrun(arguments)
    except SignalException as ended:
        return 128 + ended.sigval
    except ChildFailedError:
        return 1
    return 0


def _generation() -> int:
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _keep(error: Exception) -> None:
    """Write the error where the node reads it, in a line of its own."""
    kind = "" if isinstance(error, FslError) else f"{type(error).__name__}: "
    text = f"rank {os.environ.get('RANK', '0')}: {kind}{one_line(str(error))}"
    with contextlib.suppress(KeyError, OSError):
        file = os.open(os.environ[ERRORS], os.O_WRONLY | os.O_APPEND)
        os.write(file, f"{_generation()} {text[:2000]}\n".encode())
        os.close(file)


if __name__ == "__main__":
    sys.exit(_torchrun(sys.argv[1:]) if sys.argv[1:] else main())
