"""Which sites a model of a run without rounds is made of, as status tells it."""

from fsl_async.observe.clients import ClientState
from fsl_async.observe.shares import LEAST, RECENT, Shares
from fsl_async.roles.sync.facts import VersionFact


def clients_of(*names, delta_bytes=2000):
    return {one: ClientState(one, connected=True, delta_bytes=delta_bytes) for one in names}


def version_of(**weights):
    """A version of a delta of each client, and of those used again, whose names end with "_"."""
    deltas = {name: 1 for name in weights if not name.endswith("_")}
    return VersionFact(
        1, "", 0, deltas=deltas, weights={n.rstrip("_"): w for n, w in weights.items()}
    )


def test_shares_are_of_the_newest_versions():
    """Factors count as they are, so a short step of a version counts little."""
    shares, clients = Shares(), clients_of("a", "b")
    for _ in range(RECENT):
        shares.add(version_of(b=1.0), clients)
    for _ in range(RECENT // 2):
        shares.add(version_of(a=0.5), clients)
    for _ in range(RECENT // 2):
        shares.add(version_of(b=1.5), clients)
    assert shares.of_clients() == {
        "a": {"arrivals": 0.5, "weight": 0.25},
        "b": {"arrivals": 0.5, "weight": 0.75},
    }
    (line,) = shares.lines(clients)
    assert line == "share of deltas, and of weight, in 64 versions: b 50%, 75%; a 50%, 25%"
    assert len(shares.deltas) == len(shares.weights) == RECENT


def test_a_site_with_most_of_the_weight_is_named_once():
    """Of four sites that are here one sends: more than three times an equal share."""
    shares, clients = Shares(), clients_of("a", "b", "c", "d")
    found = [shares.add(version_of(a=1.0), clients) for _ in range(LEAST + 2)]
    assert [len(one) for one in found] == [0] * (LEAST - 1) + [1, 0, 0]
    (warning,) = found[LEAST - 1]
    assert warning.startswith("a has 100% of the weight of the last 16 versions, more than 3 times")
    assert "of 4 sites" in warning
    assert "outer.aggregation = latest" in warning
    assert "a has 100%" in shares.lines(clients)[1]
    for _ in range(LEAST):
        shares.add(version_of(b=1.0), clients)
    assert not shares.warnings


def test_a_run_by_rounds_has_no_shares():
    """Its versions have no weights on record."""
    shares = Shares()
    assert shares.add(VersionFact(1, "", 0, deltas={"a": 1}), clients_of("a")) == []
    assert shares.lines({}) == []
    assert shares.of_clients() == {}


def test_the_bytes_of_deltas_that_are_used_again_are_told():
    """One of each client that the newest version has."""
    shares, clients = Shares(), clients_of("a", "b", "c")
    shares.add(version_of(a=0.5, b_=0.5), clients)
    assert shares.lines(clients)[-1] == (
        "kept to be used again: the newest delta of each of 2 clients, 4.0 kB"
    )
