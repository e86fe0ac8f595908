"""The report of a storm: every figure against one that is counted here by hand."""

from facts import VersionFact, client_line, line_of

from fsl_async.commands.chaos import text_lines
from fsl_async.tools.chaos.report import report


def times(count, median_s, p95_s):
    return {"count": count, "median_s": median_s, "p95_s": p95_s}


NAMES = ["a", "b", "c", "d"]


def version(number, at, names, tokens=100):
    merged = [{"key": f"{name}/1/0/{number}"} for name in names]
    return {
        "fact": "version",
        "version": number,
        "at": at,
        "merged": merged,
        "tokens_total": tokens,
    }


def event(t, kind, peer, **more):
    return {"t": t, "kind": "event", "type": kind, "peer": peer, "incarnation": 1, **more}


def hello(t, peer, incarnation=1):
    begun = client_line(t, peer, "joining", incarnation=incarnation, begins=True)
    return [event(t, "client_hello", peer, incarnation=incarnation), begun]


def left(t, peer):
    return [event(t, "client_left", peer), client_line(t, peer, "gone", why="expired")]


def held(t, peer, version, incarnation=1):
    fact = client_line(t, peer, "training", version, incarnation)
    return [event(t, "holding", peer, version=version), fact]


def committed(t, number):
    return line_of(VersionFact(number, "", 0), t)


def call(t, number):
    message = {"type": "call/1", "round": number}
    return {"t": t, "kind": "effect", "type": "send", "peer": "a", "message": message}


def storm(*lines, start=100.0, over=200.0):
    begin = {"t": start, "what": "storm", "clients": NAMES}
    return [begin, *lines, {"t": over, "what": "over"}]


def fault(number, kind, name, begin, end=None):
    facts = {"fault": number, "kind": kind, "name": name}
    last = begin + 0.001 if end is None else end
    return [{"t": begin, "what": "begin", **facts}, {"t": last, "what": "end", **facts}]


LEDGER = [
    version(0, 10.0, [], 0),
    version(1, 50.0, NAMES, 1000),
    version(2, 90.0, NAMES, 5000),  # 4000 tokens in 40 s
    version(3, 110.0, NAMES, 7000),
    version(4, 130.0, ["a", "c", "d"], 8200),
    version(5, 150.0, ["a", "c"], 9000),
    version(6, 190.0, NAMES, 11800),  # 4800 tokens in 80 s
]
JOURNAL = [
    *(line for name in NAMES for line in hello(5.0, name)),
    committed(90.0, 2),
    *(line for name in NAMES for line in held(91.0, name, 2)),
    {"t": 95.0, "type": "traffic", "kind": "note", "coded": {"x": 1000}, "sockets": {"up": 1500}},
    call(108.0, 3),
    committed(110.0, 3),
    *left(123.0, "b"),
    call(128.0, 4),
    committed(130.0, 4),
    *hello(131.0, "b", 2),
    *held(132.0, "b", 4, 2),
    *left(147.0, "d"),
    call(148.0, 5),
    committed(150.0, 5),
    *hello(155.5, "d"),
    *held(156.0, "d", 5),
    event(170.0, "heartbeat_received", "c", payload={}),
    *held(170.5, "c", 5),
    call(188.0, 6),
    committed(190.0, 6),
    {"t": 199.0, "type": "traffic", "kind": "note", "coded": {"x": 9000}, "sockets": {"up": 11500}},
]
FAULTS = [
    *fault(0, "kill", "b", 120.0),
    *fault(1, "stop", "d", 145.0, 155.0),
    *fault(2, "partition", "c", 160.0, 168.0),
    *fault(3, "slow", "a", 160.0, 168.0),
]


def made():
    return report(storm(*FAULTS), JOURNAL, LEDGER, {"b": [131.9]})


def test_throughput_is_of_the_time_before():
    """Rates are between the first and the last version, so partial periods count for nothing."""
    found = made()
    assert (found["tokens_per_s_before"], found["tokens_per_s"]) == (100.0, 60.0)
    assert found["throughput"] == 0.6


def test_alive_follows_from_the_fault_log():
    """Participation must depend on the faults, not on the parameter server's view of them."""
    found = made()
    # b is killed at 120 and trains again at 131.9; d is stopped from 145 to 155. So all living
    # clients took part, except b in version 5.
    assert found["syncs"] == 4
    assert found["participation"] == round((1 + 1 + 2 / 3 + 1) / 4, 4)
    assert found["participation_least"] == round(2 / 3, 4)


def test_times_are_counted_from_the_ends_of_faults():
    """A kill ends at once; a stopped client cannot be back before the stop ends."""
    found = made()
    # b after 3 s, d after 2 s; the cut of c was never detected
    assert found["detect"] == times(2, 2.0, 3.0)
    # d 0.5, c 2, b 11
    assert found["resume"] == times(3, 2.0, 11.0)
    # d 1.0, c 2.5 when it reports version 5, b 12
    assert found["back"] == times(3, 2.5, 12.0)
    assert found["back_after_kill"] == times(1, 12.0, 12.0)
    assert found["never_back"] == 0


def test_bytes_other_than_chunks_are_control():
    """Control is the difference: 10000 bytes at the sockets, 8000 of chunks."""
    found = made()
    assert (found["control_bytes"], found["control_share"]) == (2000, 0.2)


def test_a_failed_fault_does_not_count():
    """A fault is logged before it is injected, so the log has failed ones too."""
    missed = {"t": 120.5, "what": "missed", "fault": 0, "kind": "kill"}
    found = report(storm(FAULTS[0], missed), JOURNAL, LEDGER, {})
    assert (found["faults"], found["never_back"]) == (0, 0)


def test_clients_that_never_come_back_are_counted():
    """The medians are of recovered clients only and would hide the others."""
    found = report(storm(*fault(0, "kill", "a", 180.0)), JOURNAL, LEDGER, {})
    assert (found["never_back"], found["back"]["count"]) == (1, 0)
    assert any("not recovered" in line for line in text_lines(found))
