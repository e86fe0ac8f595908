"""`fsl-node quarantine RUN_DIR [DELTA]`: take an accepted delta out of a stopped run."""

from __future__ import annotations

from pathlib import Path

import click
from attrs import asdict, frozen

from fsl_async.commands.options import RunDir
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError


@frozen
class Pending:
    """A delta that is accepted and not yet merged."""

    delta: str
    tokens: int
    steps: int
    norm: float
    bytes: int


@click.command("quarantine")
@click.argument("run_dir", type=RunDir())
@click.argument("delta", required=False)
@click.option("--reason", default="by hand", show_default=True, help="Written to the ledger.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, run_dir: Path, delta: str | None, reason: str, as_json: bool) -> int:
    """Keep DELTA (client/incarnation/base/sequence) out of the run in RUN_DIR.

    The parameter server must be stopped, and the delta accepted but not yet merged; without DELTA
    these are listed. Then it is never merged, its file stays in RUN_DIR/quarantine, and its client
    gets that answer when it offers the delta again. To undo a merged delta, go back to an older
    version with --from-version.
    """
    from fsl_async.commands.status import with_ledger
    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.errors import CheckpointDamaged, StoreError
    from fsl_async.store.store import Store

    output = Output(as_json=as_json)
    run_dir = with_ledger(run_dir)
    store = Store(run_dir, only_facts=True)
    try:
        recovered = store.recover()
        for line in recovered.lost:
            output.say(line)
        rows = [
            Pending(one.key.text, one.delta.tokens, one.delta.steps, one.norm, one.bytes)
            for one in recovered.pending
        ]
        if delta is None:
            for row in rows:
                output.say(f"{row.delta}: {row.tokens:,} tokens, norm {row.norm:.4g}")
            output.say(f"{len(rows)} accepted deltas are not merged yet")
            if as_json:
                output.result({"pending": [asdict(row) for row in rows]})
            return 0
        if delta not in {row.delta for row in rows}:
            raise RunDirError(
                f"{delta} is no accepted delta of {run_dir} that waits to be merged;"
                " without DELTA these are listed"
            )
        store.quarantine(DeltaKey.parse(delta), reason)
    except (StoreError, CheckpointDamaged) as error:
        raise RunDirError(str(error)) from None
    finally:
        store.close()
    output.say(f"{delta} is in {run_dir / 'quarantine'} and will not be merged")
    if as_json:
        output.result({"quarantined": delta, "reason": reason})
    return 0
