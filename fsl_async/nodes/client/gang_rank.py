"""A rank of `fsl-node --role client --ranks N`: torchrun runs this module N times."""

from __future__ import annotations

import os
import sys

from fsl_async.errors import FslError, describe, one_line
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.orders import RunFinishedError
from fsl_async.learn.gang.link import ADDRESS, NodeLostError
from fsl_async.learn.user_code import load_task, own_failure
from fsl_async.nodes.client.gang_joining import Place, RankSession, dial, process_group
from fsl_async.nodes.client.joining import built_in, context_of, start_line


def main() -> int:
    """Train as one rank, until the node lets it go. Returns the exit code."""
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    place = Place.here() or Place(0, 1, generation, 0, 1)
    session = RankSession(dial(os.environ[ADDRESS]), place)
    try:
        _train(session)
        session.training.serve()
    except NodeLostError as error:
        return _report(place, error)
    except FslError as error:
        session.failed(error)
        return _report(place, error)
    return 0


def _train(session: RankSession) -> None:
    try:
        options, member = session.wait_welcome()
        context = session.context(context_of(options, member, _say))
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
        sys.stderr.write(known.trace)
        raise SystemExit(1) from None


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _report(place: Place, error: BaseException) -> int:
    found = describe(error)
    sys.stderr.write(one_line(f"rank {place.rank}: {found.message}") + "\n")
    return found.exit_code or 1


if __name__ == "__main__":
    sys.exit(main())
