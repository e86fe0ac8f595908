"""`fsl-node quarantine RUN_DIR [DELTA]`: take an accepted delta out of a stopped run, before a version holds it."""

from __future__ import annotations

from pathlib import Path

import click
from attrs import asdict, frozen

from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError

KEEP_ALL = 1_000_000
"""Versions: opening a store removes those beyond its settings, and that is the server's decision."""


@frozen
class Pending:
    """A delta that is accepted and in no version yet."""

    delta: str
    tokens: int
    steps: int
    norm: float
    bytes: int


@click.command("quarantine")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("delta", required=False)
@click.option("--reason", default="by hand", show_default=True, help="Kept in the ledger.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(*, run_dir: Path, delta: str | None, reason: str, as_json: bool) -> int:
    """Keep DELTA (client/incarnation/base/sequence) out of the run in RUN_DIR, whose server is stopped.

    For a delta that was accepted and is not merged yet; without DELTA these are listed. It is never merged then, its file stays in
    RUN_DIR/quarantine, and its client is told so when it offers it again. What is in a version already: --from-version.
    """
    from fsl_async.roles.sync.delta import DeltaKey
    from fsl_async.store.errors import CheckpointDamaged, StoreError
    from fsl_async.store.records import StoreSettings
    from fsl_async.store.store import Store

    output = Output(as_json=as_json)
    if not (run_dir / "ledger.jsonl").is_file():
        raise RunDirError(f"{run_dir} has no ledger: give the run directory of a server")
    store = Store(run_dir, StoreSettings(keep_versions=KEEP_ALL))
    try:
        recovered = store.recover()
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
                f"{delta} is no accepted delta of {run_dir} that waits to be merged; without DELTA these are listed"
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
