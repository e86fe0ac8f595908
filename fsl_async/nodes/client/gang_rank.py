"""A rank of `fsl-node --role client --ranks N`: torchrun runs this module N times.

Imports what trains in `main`, so that its errors reach the node too.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING

from fsl_async.errors import FslError, describe, one_line
from fsl_async.learn.gang.link import ADDRESS, ERRORS, NodeLostError

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
    from fsl_async.nodes.client.gang_joining import Place, RankSession, dial

    place = Place.here() or Place(0, 1, _generation(), 0, 1)
    session = RankSession(dial(os.environ[ADDRESS]), place)
    try:
        _train(session)
        session.training.serve()
    except NodeLostError as error:
        return _report(place.rank, error)
    except FslError as error:
        session.failed(error)
        return _report(place.rank, error)
    return 0


def _train(session: RankSession) -> None:
    from fsl_async.learn.client.fed import Fed
    from fsl_async.learn.client.ports import RunFinishedError
    from fsl_async.learn.user_code import load_task, own_failure
    from fsl_async.nodes.client.gang_joining import process_group
    from fsl_async.nodes.client.joining import built_in, context_of, start_line
    from fsl_async.process.script import print_line

    try:
        options, member = session.wait_welcome()
        context = session.context(context_of(options, member, print_line))
        function = load_task(options.task) if options.task else built_in(member.config, options)
        context.log(start_line(context, options.threads))
        process_group(context.device)
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


def _report(rank: int, error: BaseException) -> int:
    found = describe(error)
    sys.stderr.write(one_line(f"rank {rank}: {found.message}") + "\n")
    return found.exit_code or 1


if __name__ == "__main__":
    sys.exit(main())
