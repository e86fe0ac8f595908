"""`fsl-node quarantine RUN_DIR [DELTA]`: take accepted deltas out of a stopped run."""

from __future__ import annotations

from pathlib import Path

import click

from fsl_async.commands.options import RunDir, Whole
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError, UsageError


@click.command("quarantine")
@click.argument("run_dir", type=RunDir())
@click.argument("delta", required=False)
@click.option("--client", "clients", multiple=True, help="All its deltas that wait; repeatable.")
@click.option(
    "--from-version", type=Whole(min=0), help="With --client: go back to this version first."
)
@click.option("--reason", default="by hand", show_default=True, help="Written to the ledger.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    *,
    run_dir: Path,
    delta: str | None,
    clients: tuple[str, ...],
    from_version: int | None,
    reason: str,
    as_json: bool,
) -> int:
    """Keep DELTA (client/incarnation/base/sequence) out of the run in RUN_DIR.

    The parameter server must be stopped, and the delta accepted but not yet merged; without DELTA
    these are listed. Then it is never merged, its file stays in RUN_DIR/quarantine, and its client
    gets that answer when it offers the delta again.

    --client NAME --from-version N undoes what a client has destroyed: in one step the run goes back
    to version N, and these deltas are kept out: those of the client that wait or were merged after
    N, and those that others computed from versions after N. Others wait to be merged again.
    """
    from fsl_async.observe.node_folders import with_ledger
    from fsl_async.store.errors import CheckpointDamaged, StoreError
    from fsl_async.store.records import to_fact
    from fsl_async.store.store import Store

    output = Output(as_json=as_json)
    if (delta is not None and clients) or (from_version is not None and not clients):
        raise UsageError("give DELTA or --client NAME; --from-version N goes with --client")
    run_dir = with_ledger(run_dir)
    leave_out = dict.fromkeys(clients, reason)
    store = Store(run_dir, only_facts=True, from_version=from_version, leave_out=leave_out)
    try:
        recovered = store.recover()
        notices, done = [*recovered.lost, *store.notices], [*store.aside]
        wanted = {delta} if delta else set(clients)
        if not wanted:
            for one in recovered.pending:
                output.say(f"{one.key.text}: {one.delta.tokens:,} tokens, norm {one.norm:.4g}")
            output.say(f"{len(recovered.pending)} accepted deltas are not merged yet")
            if as_json:
                rows = [{"delta": one.key.text, **to_fact(one)} for one in recovered.pending]
                output.result({"pending": rows})
            return 0
        keys = [one.key for one in recovered.pending]
        chosen = [key for key in keys if key.client in clients or key.text == delta]
        absent = wanted - {text for key in chosen for text in (key.text, key.client)}
        if absent and from_version is None:
            raise RunDirError(
                f"no delta {min(absent)} of {run_dir} waits to be merged;"
                " without DELTA and --client these are listed"
            )
        for key in chosen:
            store.quarantine(key, reason)
    except (StoreError, CheckpointDamaged) as error:
        raise RunDirError(str(error)) from None
    finally:
        store.close()
    done += [key.text for key in chosen]
    lines = (
        *notices,
        *(f"{key} is in {run_dir / 'quarantine'} and will not be merged" for key in done),
    )
    output.say(*lines, f"the next start goes on from version {recovered.version}")
    if as_json:
        output.result({"quarantined": done, "reason": reason, "notices": notices})
    return 0
