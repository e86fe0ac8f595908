"""What the journal's lines about clients and their sessions change in a run. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fsl_async.observe.clients import ClientState, Line
from fsl_async.observe.run import Run
from fsl_async.observe.training_lost import REASONS
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.training_trouble import trouble_in


def _connected(run: Run) -> str:
    """How many clients have a session now, for lines about those that come and go."""
    run.repeats_may_be_news()
    here = sum(client.connected for client in run.clients.values())
    return f"{counted(here, 'client')} connected"


def _hello(run: Run, line: Line) -> None:
    client = run.client_of(line)
    how = client.arrive(int(line["incarnation"]), in_run=bool(line.get("run")))
    words = {
        "joined": "joins",
        "relaunched": f"is back as a new process (relaunch {client.relaunches})",
        "reconnected": "is connected again",
    }
    if how:
        run.tell(how, f"{client.name} {words[how]}, {_connected(run)}", client.name)


def _admitted(run: Run, line: Line) -> None:
    """At a split server: there is nothing that it would have to fetch first."""
    _hello(run, line)
    client = run.client_of(line)
    client.returning, client.doing = False, "training"


def _left(run: Run, line: Line) -> None:
    if str(line["peer"]) not in run.clients:
        return  # it was refused
    client = run.client_of(line)
    if int(line["incarnation"]) != client.incarnation or not client.connected:
        return
    reason = str(line.get("reason", ""))
    if run.node.phase == "ended":
        client.connected, client.doing = False, "done"
        return
    client.lose(run.node.last_t, REASONS.get(reason, reason))
    if reason == "bye":
        client.training.end(str(line.get("why") or client.gone_why))
    level = "info" if reason == "bye" else "warning"
    text = f"{client.name} left: {client.gone_why}, {_connected(run)}"
    run.tell("gone", text, client.name, level)


def _refuse(run: Run, line: Line) -> None:
    text = f"refused {line['peer']}: {line.get('text', '')}"
    run.tell("refused", text, str(line["peer"]), "warning")
    run.refused(str(line["peer"]))


def _fetch_asked(run: Run, line: Line) -> None:
    run.client_of(line).doing = "fetching"


def _stream_lost(run: Run, line: Line) -> None:
    client = run.client_of(line)
    if client.doing in {"sending", "publishing"}:
        client.doing = "training" if client.version >= 0 else "joining"


def _beat(run: Run, line: Line) -> None:
    client = run.client_of(line)
    payload = line["payload"]
    client.step = int(payload.get("step", client.step))
    client.tokens = client.tokens_before + int(payload.get("tokens", 0))
    if run.node.keeps_deltas:
        client.training.has_trained(client.tokens - client.tokens_before)
    client.tokens_per_s = float(payload.get("tokens_per_s", 0.0))
    client.left_out = client.left_out_before + int(payload.get("left_out", 0))
    lag = payload.get("lag_p99_ms")
    client.lag_p99_ms = float(lag) if isinstance(lag, int | float) else client.lag_p99_ms
    client.tells_loss = client.tells_loss or payload.get("loss") is not None
    client.saw_loss(payload.get("loss"))
    # Without a loss (its site keeps that) the heartbeat alone can tell that it is over.
    look_for_trouble(run, client, payload, may_end="loss" not in payload)
    hung_s = payload.get("hung_s")
    hangs = isinstance(hung_s, int | float) and not isinstance(hung_s, bool)
    if hangs and not client.hangs:
        text = f"{client.name} hangs: its training has made no step for {hung_s:.0f} s"
        run.tell("hangs", text, client.name, "warning")
    elif client.hangs and not hangs:
        run.tell("hangs no more", f"{client.name} makes steps again", client.name)
    client.hangs = hangs


def look_for_trouble(
    run: Run, client: ClientState, metrics: Mapping[str, Any], *, may_end: bool
) -> None:
    """Tell when training begins to go wrong, and when that is over: a whole round went well."""
    trouble = trouble_in(metrics)
    if trouble and not client.trouble:
        text = f"{client.name} trains badly: {trouble}"
        run.tell("trains badly", text, client.name, "warning")
    elif client.trouble and may_end and not trouble:
        run.tell("trains well", f"{client.name} trains well again", client.name)
    if trouble or may_end:
        client.trouble = trouble


HANDLERS: dict[str, Callable[[Run, Line], None]] = {
    "client_hello": _hello,
    "admit_split": _admitted,
    "client_left": _left,
    "refuse": _refuse,
    "fetch_asked": _fetch_asked,
    "stream_lost": _stream_lost,
    "heartbeat_received": _beat,
}
