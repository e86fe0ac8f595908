"""`fsl-node quarantine RUN_DIR [DELTA]`: take accepted deltas out of a stopped run."""

from __future__ import annotations

from pathlib import Path

import click

from fsl_async.commands.options import RunDir, Whole, WithJson, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import RunDirError, UsageError


class QuarantineOptions(WithJson):
    """The options of `fsl-node quarantine`."""

    run_dir: Path = argument(RunDir())
    delta: str | None = argument(required=False)
    clients: tuple[str, ...] = option("All its deltas that wait; repeatable.", name="--client")
    from_version: int | None = option("With --client: go back to this version first.", Whole(min=0))
    reason: str = option("Written to the ledger.", default="by hand")


@click.command("quarantine")
@takes(QuarantineOptions)
def command(options: QuarantineOptions) -> int:
    """Keep DELTA (client/incarnation/base/sequence) out of the run in RUN_DIR.

    The parameter server must be stopped, and the delta accepted but not yet merged; without DELTA
    these are listed. Then it is never merged, its file stays in RUN_DIR/quarantine, and its client
    gets that answer when it offers the delta again.

    --client NAME --from-version N undoes what a client has destroyed: in one step the run goes back
    to version N, and these deltas are kept out: those of the client that wait or were merged after
    N, and those that others computed from versions after N. Others wait to be merged again.
    """
    from fsl_async.observe.node_folders import with_ledger
    from fsl_async.store.book.records import to_fact
    from fsl_async.store.errors import CheckpointDamaged, StoreError
    from fsl_async.store.store import Store

    output = Output(as_json=options.as_json)
    delta, clients, from_version = options.delta, options.clients, options.from_version
    if (delta is not None and clients) or (from_version is not None and not clients):
        raise UsageError("give DELTA or --client NAME; --from-version N goes with --client")
    run_dir = with_ledger(options.run_dir)
    leave_out = dict.fromkeys(clients, options.reason)
    store = Store(run_dir, only_facts=True, from_version=from_version, leave_out=leave_out)
    try:
        recovered = store.recover()
        notices, done = [*recovered.lost, *store.notices], [*store.aside]
        wanted = {delta} if delta else set(clients)
        if not wanted:
            for one in recovered.pending:
                output.say(f"{one.key.text}: {one.delta.tokens:,} tokens, norm {one.norm:.4g}")
            output.say(f"{len(recovered.pending)} accepted deltas are not merged yet")
            if output.as_json:
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
            store.run.quarantine(key, options.reason)
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
    if output.as_json:
        output.result({"quarantined": done, "reason": options.reason, "notices": notices})
    return 0
