"""Clients that send false token counts or absurd values: capped, clipped, excluded, released."""

import itertools

import pytest
from attrs import evolve
from configs import guard_of
from deltas import delta_of, key, stored_of

from fsl_async.roles.sync import effects as do
from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync import norm_guard
from fsl_async.roles.sync.delta import MergedDelta
from fsl_async.roles.sync.norm_guard import NormGuard


@pytest.fixture(autouse=True)
def _few_deltas(monkeypatch):
    """Medians count after three deltas, so that each test needs few."""
    monkeypatch.setattr(norm_guard, "LEAST_DELTAS", 3)


def usual(norms, tokens=()):
    """Deltas that were merged before, each of its own client, with these norms."""
    return tuple(
        stored_of(key(f"before{number}"), norm, tokens=count)
        for number, (norm, count) in enumerate(itertools.zip_longest(norms, tokens, fillvalue=8))
    )


def screen(norms=(), tokens=(), by_order=False, **rules):
    made = NormGuard(guard_of(**rules), by_order=by_order)
    made.recovered(usual(norms, tokens), ())
    return made


def clips(made, *norms, steps=(), orders=(), base=0):
    """The norms with which a version counts deltas of so many norms, each of its own client."""
    merged = [
        MergedDelta(
            evolve(delta_of(key(f"c{number}", base=base), steps=count), facts=facts), 0, 1.0, norm
        )
        for number, (norm, count, facts) in enumerate(
            zip(
                norms,
                steps or [2] * len(norms),
                [{"order": one} for one in orders] or [{}] * len(norms),
                strict=True,
            )
        )
    ]
    found = made.clips(merged)
    return [found.get(one.key, 1.0) * one.norm for one in merged]


def tokens_of(made, which, tokens, now):
    return made.tokens(delta_of(which, tokens), now)


# --- the rules ------------------------------------------------------------------------------------


def test_clip_norm_by_hand():
    """Norms above the limit count as the limit; others are unchanged."""
    assert clips(screen(clip_norm=2.0), 0.0, 1.0, 2.0, 8.0) == [0.0, 1.0, 2.0, 2.0]


def test_the_first_version_is_clipped_by_its_own_median():
    """Nothing is known of earlier ones, and an attacker of 1e18 need not wait for that."""
    made = screen(clip_median=1.5)
    assert clips(made, 1.0, 1.2, 1e18, 0.8) == pytest.approx([1.0, 1.2, 1.65, 0.8])
    assert clips(made, 1.0, 1e18) == pytest.approx([1.0, 1.5]), "of two, the shorter"
    assert clips(made, 1e18) == [1e18], "with nothing to compare"
    assert clips(screen(clip_median=1.5, clip_norm=1.2), 1.0, 1.0, 9.0)[2] == pytest.approx(1.2)


def test_a_version_of_few_clients_is_completed_with_the_newest_of_others():
    """So that a client that is alone in a version has a measure, also after a restart."""
    made = screen([1.0, 3.0], clip_median=2.0)
    assert clips(made, 50.0) == pytest.approx([6.0])
    for number in range(9):
        made.accepted(stored_of(key("before1", number), 1e-9), 0.0)
    assert clips(made, 50.0, 1.0) == pytest.approx([2.0, 1.0]), "many deltas of a client are one"
    assert clips(made, 50.0, base=4) == [2.0]
    assert clips(made, 50.0, base=5) == [50.0], "those that have left are no measure"
    assert clips(made, 9.0, 9.0, 9.0) == [9.0] * 3, "a version of enough is its own measure"


def test_norms_are_compared_as_of_as_many_steps():
    """A client of four times the steps may be that much longer; a claim of more helps no more."""
    made = screen(clip_median=1.5)
    assert clips(made, 1.0, 1.0, 2.9, steps=(100, 100, 400)) == [1.0, 1.0, 2.9]
    assert clips(made, 1.0, 1.0, 1e9, steps=(100, 100, 10**12))[2] == pytest.approx(3.0)
    assert clips(made, 1.0, 1.0, 0.2, steps=(100, 100, 1)) == pytest.approx([1.0, 1.0, 0.15])
    made.growth = 1.0
    assert clips(made, 1.0, 1.0, 5.9, steps=(100, 100, 400)) == [1.0, 1.0, 5.9]
    assert clips(made, 1.0, 100.0, steps=(1, 100)) == [1.0, 100.0], "a short delta as the measure"
    assert clips(made, 1.0, 1.0, 1e9, steps=(100, 100, 10**12))[2] == pytest.approx(6.0)
    assert clips(made, 1.0, 1.0, 0.2, steps=(100, 100, 1)) == pytest.approx([1.0, 1.0, 0.15])
    made.growth = 0.0
    assert clips(made, 1.0, 1.0, 9.0, steps=(100, 100, 1))[2] == pytest.approx(0.015)


def test_orders_of_steps_are_compared_apart():
    """Zeroth order moves weights less; to be the only one with scalars is no way out."""
    made = screen(clip_median=1.5, by_order=True)
    assert clips(made, 9.0, 9.0, 1.0, 1.0, orders=(1, 1, 0, 0)) == [9.0, 9.0, 1.0, 1.0]
    assert clips(made, 9.0, 1.0, 1.0, orders=(0, 1, 1))[0] == pytest.approx(1.5)
    assert clips(made, 9.0, 1.0, 1.0, orders=(1, 0, 0))[0] == 9.0, "the only one that steps by it"
    zeroth = stored_of(key("z"), 1e-9)
    made.accepted(evolve(zeroth, delta=evolve(zeroth.delta, facts={"order": 0})), 0.0)
    assert clips(made, 9.0, 9.0, orders=(1, 1)) == [9.0, 9.0], "nor is it completed by others"
    made = screen(clip_median=1.5)
    found = clips(made, 9.0, 9.0, 1.0, 1.0, 1.0, orders=(7, 7, 1, 1, 1))
    assert found[:2] == pytest.approx([1.5] * 2), "a claim is no order"


def test_outliers_by_the_median():
    """An attacker's own norms move a median little; the reason names both numbers."""
    made = screen([1.0, 1.0, 1.0, 900.0], outlier_median=5.0)
    assert made.outlier(5.0) is None
    assert made.outlier(5.1) == "its norm of 5.1 is above 5 x the median of 1"
    assert screen([1.0, 1.0], outlier_median=5.0).outlier(1e9) is None


def test_many_deltas_of_a_client_are_one_norm_in_the_medians():
    """Else 36 tiny ones in each version exclude all honest deltas, and 36 large ones none."""
    for norm in (1e-9, 1e9):
        made = screen(outlier_median=3.0)
        for name in "abcd":
            made.accepted(stored_of(key(name)), 0.0)
        for number in range(36):
            made.accepted(stored_of(key("liar", number), norm), 0.0)
        assert made.outlier(1.0) is None
        assert made.outlier(9.0) is not None


def test_tokens_by_the_clock():
    """Tokens are limited by the time since the hello, and since the last delta."""
    made = screen(max_tokens_per_s=100.0)
    made.joined("a", 10.0)
    made.joined("a", 19.0)  # a second hello changes nothing
    assert tokens_of(made, key("a"), 900, 20.0) == (900, None)
    counted, why = tokens_of(made, key("a", 2), 5000, 20.0)
    assert counted == 1000
    assert "1000 of the 5000 tokens that a claims count: 100 a second for 10.0 s" in why
    made.stored("a", 21.0)
    assert tokens_of(made, key("a", 3), 5000, 22.0)[0] == 100
    assert tokens_of(made, key("new"), 5000, 22.0)[0] == 1


def test_tokens_a_step_by_the_median():
    """A client that claims the usual tokens in one step would have nearly the whole average."""
    made = screen([1.0] * 3, [100, 200, 300], max_tokens_median=2.0)  # of two steps each

    def counted(tokens, steps):
        return made.tokens(delta_of(key("b", steps), tokens, steps), 0.0)[0]

    assert counted(200, 1) == 200, "twice the median of 100 a step"
    assert counted(300, 1) == 200
    assert counted(300, 2) == 300
    assert counted(300, 0) == 1, "without steps it has no weight"


# --- in the parameter server ----------------------------------------------------------------------


@pytest.fixture
def guarded(make_server):
    """A parameter server with rules and three clients, after a round of usual deltas."""

    def make(**rules):
        server = make_server(guard=guard_of(**rules))
        server.begin("a", "b", "c")
        server.fire()
        for name in "abc":
            server.store(key(name))
        server.committed(1)
        for name in "abc":
            server.hold(name, 1)
        server.fire()
        return server

    return make


def test_a_delta_of_which_products_are_formed_is_multiplied(make_server, look):
    """A smaller weight does not bound a product, so the weight stays."""
    server = make_server(guard=guard_of(clip_median=1.5), clips_values=True)
    server.begin("a", "b", "c")
    server.fire()
    server.store(key("a"), norm=6.0)
    server.store(key("b"))
    (commit,) = look.only(server.store(key("c")), do.Commit)
    assert [(one.weight, one.clip) for one in commit.merged] == [(8, 0.25), (8, 1), (8, 1)]


def test_an_outlier_is_quarantined(guarded, look):
    """It is not merged but recorded, its client gets an answer, and the round goes on."""
    server = guarded(outlier_median=10.0)
    server.store(key("b", 2, 1))
    server.store(key("c", 2, 1))
    effects = server.store(key("a", 2, 1), norm=50.0)
    reason = "its norm of 50 is above 10 x the median of 1"
    assert look.only(effects, do.Quarantine) == [do.Quarantine(key("a", 2, 1), reason)]
    assert look.sent(effects, "a") == [msg.Declined(key("a", 2, 1), "quarantined", reason)]
    (commit,) = look.only(effects, do.Commit)
    assert [one.key.client for one in commit.merged] == ["b", "c"]
    assert look.sent(server.offer(key("a", 2, 1), number=1))[0].code == "quarantined"


def test_a_held_outlier_is_released(guarded, look):
    """With release its client gets Accepted, and a later version merges it with its staleness."""
    server = guarded(outlier_median=10.0, release=True)
    held = key("a", 2, 1)
    effects = server.store(held, norm=60.0)
    assert look.only(effects, do.Quarantine)[0].held
    assert look.sent(effects, "a") == [msg.Accepted(held)]
    assert look.sent(server.offer(held, number=1)) == [msg.Accepted(held)]
    server.store(key("b", 2, 1), norm=9.0)
    server.store(key("c", 2, 1), norm=9.0)
    effects = server.committed(2)
    assert look.only(effects, do.Release) == [do.Release(held)]
    assert list(server.machine.deltas.pending) == [held]
    assert server.machine.deltas.staleness(held) == 1
    assert not look.only(server.committed(3), do.Release)


def test_a_held_outlier_becomes_too_stale(make_server, look):
    """Beyond max_staleness it is not released."""
    server = make_server(guard=guard_of(outlier_median=2.0, release=True), max_staleness=1)
    server.begin("a", "b")
    server.fire()
    server.store(key("b"))
    server.store(key("a"), norm=50.0)
    for version in (1, 2):
        server.committed(version)
    for _ in range(60):
        server.machine.guard.accepted(stored_of(key("b"), 50.0), 0.0)
    assert not look.only(server.committed(3), do.Release)


def test_a_false_token_count_reaches_no_ledger(make_server, look):
    """The store gets the counted tokens, so ledger, weight and limit use the same number."""
    server = make_server(guard=guard_of(max_tokens_per_s=100.0))
    server.begin("a")
    server.now += 5.0
    effects = server.offer(key("a"), tokens=10**9, number=0)
    assert [one.delta.tokens for one in look.only(effects, do.ReceiveDelta)] == [500]
    assert "500 of the 1000000000 tokens" in look.notes(effects)
    server.now += 5.0
    assert [
        one.delta.tokens
        for one in look.only(server.offer(key("a"), tokens=10**9, number=0), do.ReceiveDelta)
    ] == [500]


def test_after_a_restart_the_same_is_excluded(make_server, look):
    """After a crash between a delta's ledger line and the decision, the decision is the same."""
    rules = guard_of(outlier_median=10.0)
    server = make_server(guard=rules)
    pending = (stored_of(key("a", 2, 1), 50.0), stored_of(key("b", 2, 1), 1.5))
    effects = server.recover(
        1, "d1", digests={1: "d1"}, pending=pending, usual=usual([1.0, 1.0, 2.0])
    )
    assert [one.key.client for one in look.only(effects, do.Quarantine)] == ["a"]
    assert [key.client for key in server.machine.deltas.pending] == ["b"]


def test_a_rule_that_needs_more_clients_waits(make_server, look):
    """With two of three clients the trimmed mean is no protection; the next round merges all."""
    server = make_server(least_clients=3, aggregation="trimmed")
    server.begin("a", "b", "c")
    server.fire()
    server.store(key("a"))
    server.store(key("b"))
    effects = server.receive(msg.Skip(0, "nothing trained"), "c")
    assert not look.only(effects, do.Commit)
    assert "trimmed needs deltas of 3 clients, there are 2" in look.notes(effects)
    server.fire()
    server.store(key("a", 2))
    server.store(key("b", 2))
    (commit,) = look.only(server.store(key("c")), do.Commit)
    assert len(commit.merged) == 5
