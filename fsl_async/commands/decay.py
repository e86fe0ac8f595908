"""`fsl-node decay RUN_DIR`: let the learning rates of a running run fall from now on."""

from __future__ import annotations

import time
from pathlib import Path

import click

from fsl_async.commands.options import Finite, RunDir, Whole, WithJson, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError, UsageError

WAIT_S = 15.0
_POLL_S = 0.2
LIMIT_WORDS = "the run's limit of"
"""In the reason of a run that has reached its end (`roles.sync.progress`)."""


class DecayOptions(WithJson):
    """The options of `fsl-node decay`."""

    run_dir: Path = argument(RunDir())
    rounds: int | None = option("End after N more syncs.", Whole(1), "N")
    tokens: int | None = option("End after N more tokens.", Whole(1), "N")
    seconds: float | None = option("End after S more seconds.", Finite(1, 1e9), "S")


@click.command("decay")
@takes(DecayOptions)
def command(options: DecayOptions) -> int:
    """Let the learning rates of the run in RUN_DIR fall from now on, to its end.

    Give the length of the decay by at most one option; without one it lasts until the planned end
    of the run (run.rounds, run.tokens or run.seconds). A quarter to a half of the training so far
    is usual. While rates fall already, an option sets another end. Works on the parameter server's
    machine; if the parameter server is not running, the decay begins when it is started again.
    """
    from fsl_async.nodes.ps.decay_requests import write_request
    from fsl_async.observe.node_folders import with_ledger
    from fsl_async.roles.sync.progress import RunLimits

    rounds, tokens, seconds = options.rounds, options.tokens, options.seconds
    if sum(one is not None for one in (rounds, tokens, seconds)) > 1:
        raise UsageError("give only one of --rounds, --tokens and --seconds")
    run_dir = with_ledger(options.run_dir)
    output = Output(as_json=options.as_json)
    answers = _Answers(run_dir)
    if answers.end is not None:
        raise RunDirError(
            f"{run_dir} has ended: {answers.end}; to go on, start its parameter server with a"
            " later end, then ask again"
        )
    path = write_request(run_dir, RunLimits(rounds or 0, tokens or 0, seconds or 0.0))
    answer = answers.wait(path)
    if answer is None:
        answer = "the parameter server is not running: the decay begins when it is started again"
    begun = answer.startswith(_BEGUN)
    if not (begun or path.exists()):
        raise UsageError(answer)
    output.say(answer)
    if output.as_json:
        output.result({"run_dir": str(run_dir), "begun": begun, "answer": answer})
    return 0


_BEGUN, _NOT_BEGUN = "learning rates fall", "no decay:"


class _Answers:
    """Waits for the parameter server's answer in its journal."""

    def __init__(self, run_dir: Path) -> None:
        from fsl_async.observe.journal import JOURNAL, JournalReader

        self._reader = JournalReader(run_dir / JOURNAL)
        self.end: str | None = None
        """Why the run has ended, if it has reached its end."""
        for line in self._reader.read():  # older lines are no answers
            if line.get("type") == "finish":
                reason = str(line.get("reason", ""))
                self.end = reason if LIMIT_WORDS in reason else None
            elif line.get("type") == "node_started":
                self.end = None

    def wait(self, request: Path) -> str | None:
        """Return the answer, or None if the request is not taken within WAIT_S.

        The answer to one that is taken may come later, of a parameter server that is busy.
        """
        begun_at = time.monotonic()
        while time.monotonic() < begun_at + (WAIT_S if request.exists() else 4 * WAIT_S):
            time.sleep(_POLL_S)
            for line in self._reader.read():
                text = str(line.get("text", ""))
                if line.get("type") == "note" and text.startswith((_BEGUN, _NOT_BEGUN)):
                    return text
        return None
