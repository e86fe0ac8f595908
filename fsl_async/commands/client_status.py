"""What `fsl-node status` says of a client: its journal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsl_async.commands.split_status import alive_words

if TYPE_CHECKING:
    from fsl_async.observe.state import RunState


def facts(state: RunState, now: float) -> dict[str, Any]:
    """Plain values for --json."""
    return {
        "role": "client",
        "name": state.client,
        "run": state.run,
        "client": alive_words(state, now, "the run's newest version"),
        "version": state.version,
        "leaves": list(state.leaving),
        "leaves_to": state.leaving_to,
        "traffic": state.account.as_dict(),
    }


def lines(state: RunState, now: float) -> list[str]:
    """The same for people."""
    from fsl_async.accounting.accounts import account_lines

    found = facts(state, now)
    made = [f"client: {found['client']}"]
    made.append(f"{state.client} in run {state.run or 'none yet'}, version {state.version}")
    leaves = (
        f"{', '.join(state.leaving)}, to {state.leaving_to}" if state.leaving else "nothing yet"
    )
    made.append(f"leaves this machine: {leaves}")
    return [*made, *account_lines("client", found["traffic"])]
