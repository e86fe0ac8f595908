"""`fsl-node demo`: a parameter server and clients train a small GPT, and one client is killed.

seconds / 3    SIGKILL to one client, once a round was merged (at 0.6 seconds in any case)
+ about 3 s  the parameter server detects it; the supervisor launches the client again
seconds        the end; later, by at most `PATIENCE_S`, while the killed client is not back;
earlier on a machine so slow that the end would come too late
"""

from __future__ import annotations

import sysconfig
from typing import Any

from fsl_async.errors import FslError
from fsl_async.roles.phrasing import counted, figure, megabytes
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.scenario import (
    Choices,
    Conclusion,
    Fault,
    Played,
    Scenario,
    Settings,
)

Evaluated = tuple[int, str, float]
"""A checkpoint's version and digest, and its loss in nats per byte."""
SHORT_TRIP_S = 0.1
"""The round trip that the default times of a demo allow for."""
PATIENCE_S = 8.0
SLACK_S = 15.0
"""The demo ends at most this long after `seconds`, on paths with a short round trip."""
_END_TRIPS = 40
EVALUATED_BYTES = 1 << 15
_MORE = "; give it more --seconds"


def pretrain(
    chosen: Choices, *, of_client: str = "", killed: str = "{} gets SIGKILL, is launched again"
) -> Scenario:
    """The demo. of_client, killed: what a client is, and what happens to one, in words.

    By satellite (a round trip of 0.6 s) the first weights arrive after 10 to 20 s, because TCP's
    slow start counts in round trips, and a sync takes 5 to 8.
    """
    late_s, run_dir = chosen.late_s, chosen.run_dir
    seconds = chosen.seconds or 40.0 + 60.0 * late_s
    every_s = chosen.every_s or 5.0 + 10.0 * late_s
    names = scenario.names_of(chosen.clients or 3)
    victim = scenario.victim_of(names)
    settings: Settings = {
        "run.name": "demo",
        **chosen.common(len(names)),
        "sync.every_s": every_s,
        "data.shards": len(names),
        **chosen.of_text(),
        "model.preset": chosen.preset or "0.5m",
    }

    def is_time_to_kill(played: Played) -> bool:
        merged = played.state.ps.rounds >= 1 or played.elapsed() > 0.6 * seconds
        return played.elapsed() >= seconds / 3 and merged and played.has_joined(victim)

    def is_over(played: Played) -> bool:
        """The end takes a little longer than a start of torch."""
        elapsed, extra_s = played.elapsed(), _END_TRIPS * late_s
        start_s = min(elapsed if played.joined_s is None else played.joined_s, SLACK_S)
        latest = seconds + SLACK_S + extra_s - (4.0 + 0.7 * start_s)
        fault = played.fault(victim)
        if fault is not None and fault.back is None:
            return elapsed >= min(seconds + PATIENCE_S + extra_s, max(latest, 0.9 * seconds))
        return elapsed >= min(seconds, max(latest, 0.75 * seconds))

    source = f"{sysconfig.get_path('stdlib')} (the source of Python's standard library)"
    where = "on this machine (127.0.0.1)" if chosen.places.is_here else "each in a site of its own"
    own = "a part of its own" if len(names) > 1 else "all of it"
    trip = f"a round trip takes {late_s + SHORT_TRIP_S:g} s here"
    return Scenario(
        chosen=chosen,
        settings=settings,
        nodes=[
            scenario.server(chosen, settings),
            *(scenario.client(name, run_dir, "deltas,metrics", data=chosen.text) for name in names),
        ],
        faults=[Fault(victim, is_time_to_kill)],
        is_over=is_over,
        drain_s=9.0 + _END_TRIPS * late_s,
        ends_at_s=seconds,
        introduction=[
            (
                f"a parameter server and {counted(len(names), 'client')}{of_client},"
                f" each a process of its own, {where}"
            ),
            (
                f"train a GPT of {settings['model.preset']} parameters on"
                f" {chosen.text or source}, each client on {own}"
            ),
            (
                f"every {every_s:g} s they send deltas, as {chosen.format},"
                " and get the merged weights"
            ),
            f"after {seconds / 3:.0f} s {killed.format(victim)} and has to catch up",
            *([f"{trip}, so the demo takes longer than usual"] if late_s else []),
            f"the last round is at {seconds:g} s; files and logs: {run_dir}",
            "",
        ],
        conclude=conclude,
    )


def conclude(played: Played, _: scenario.Stage) -> Conclusion:
    """Audit the ledger, and evaluate the last checkpoint on held-out text."""
    evaluated, missing = None, []
    try:
        evaluated = evaluate_last(played.scenario.chosen)
    except FslError as error:
        missing = [error.message]
    summary = summarize(played, evaluated)
    problems = [*problems_of(played, evaluated), *missing]
    return Conclusion(summary, lines(played, summary), problems)


def evaluate_last(chosen: Choices) -> Evaluated:
    """Evaluate the newest checkpoint on the held-out tail of the text. Raises FslError."""
    import torch

    from fsl_async.tools.versions import VersionEvaluator

    # On a shared machine, threads that spin for each other can cost minutes instead of a second.
    torch.set_num_threads(1)
    text, size = chosen.text or None, EVALUATED_BYTES
    evaluator = VersionEvaluator(chosen.run_dir, data=text, limit_bytes=size, own=None)
    newest = evaluator.load(evaluator.versions()[-1])
    assert newest is not None, "the run is over"
    found = evaluator.evaluate(newest)
    return newest.record.version, newest.record.digest, float(found["loss"])


def summarize(played: Played, evaluated: Evaluated | None) -> dict[str, Any]:
    """The last object of --json; that of `sim` has these keys and more.

    Losses are in nats per byte.
    """
    state, ps, audit = played.state, played.state.ps, played.audit
    return {
        "rounds": ps.rounds,
        "clients": len(played.scenario.clients),
        "tokens": audit.tokens if audit is not None else 0,
        "loss_first": _rounded(state.loss_first),
        "loss_last": _rounded(state.loss_last),
        "eval_loss": None if evaluated is None else _rounded(evaluated[2]),
        "bytes_raw": ps.bytes_raw,
        "bytes_sent": ps.bytes_sent,
        "ratio": _rounded(ps.ratio),
        **played.counts(),
        "participation": _rounded(ps.participation),
        "seconds": played.seconds,
        "run_dir": str(played.scenario.chosen.run_dir),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def problems_of(played: Played, evaluated: Evaluated | None) -> list[str]:
    """Return one line for each failed check; none for a demo that passed."""
    ps, audit = played.state.ps, played.audit
    if played.joined_s is None and ps.version < 0 and not played.problems:
        seconds = played.scenario.ends_at_s
        why = f"in {seconds:g} s no client had started (loading torch is slow here)"
        return [why + _MORE]
    tokens = ps.tokens if audit is None else audit.tokens
    newest = (ps.version, ps.digest)
    found = newest if evaluated is None else evaluated[:2]
    last = "the last checkpoint is version {} ({}), the last version of the journal {} ({})"
    return [
        *played.common_problems(_MORE),
        *scenario.failed(
            (ps.rounds > 0, f"no round was merged{_MORE}"),
            (
                tokens == ps.tokens,
                f"the ledger has {tokens} merged tokens, the journal {ps.tokens}",
            ),
            (evaluated is not None, "there is no checkpoint to evaluate"),
            (found == newest, last.format(*found, *newest)),
        ),
    ]


def lines(played: Played, summary: dict[str, Any]) -> list[str]:
    """Return the summary as text lines."""
    ps = played.state.ps
    raw, sent = megabytes(ps.bytes_raw), megabytes(ps.bytes_sent)
    less = f", {ps.ratio:.1f} times less" if ps.ratio else ""
    first, last, tested = (
        "-" if summary[name] is None else figure(summary[name])
        for name in ("loss_first", "loss_last", "eval_loss")
    )
    up, down = ("-" if one.ratio is None else f"{one.ratio:.1f}x" for one in (ps.up, ps.down))
    return [
        (
            f"{counted(ps.rounds, 'round')}, {summary['tokens']:,} tokens merged"
            f" from {counted(summary['clients'], 'client')} in {summary['seconds']:.0f} s"
        ),
        f"loss {first} at first, {last} at the end (running means, nats/byte)",
        f"loss {tested} of the last checkpoint, on held-out text",
        (
            f"{raw} of weights and deltas were sent as {sent}{less}"
            f" (up {up}, down {down}; new clients get full precision)"
        ),
        *played.last_lines(),
    ]
