"""Deltas are merged once, with their staleness and weight, or never, with a reason."""

import numpy as np
import pytest
from attrs import evolve
from configs import book_of, guard_of
from deltas import delta_of, stored_of

from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta, mean_cosine
from fsl_async.roles.sync.deltas import MAX_TOKENS, REMEMBERED_VERSIONS, Counting, Deltas
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.training_trouble import Movement
from fsl_async.roles.sync.weighting import WEIGHTINGS, TokensWeighting, weighting_named


@pytest.fixture
def book():
    """A book of a run at version 2."""
    made = book_of(TokensWeighting(), max_staleness=2, keep_versions=1)
    for version in range(3):
        made.advance(version, f"d{version}")
    return made


def key(sequence, base=2, incarnation=1, client="a"):
    return DeltaKey(client, incarnation, base, sequence)


def objection(book, one, tokens=8, steps=2, digest=None):
    digest = f"d{one.base}" if digest is None else digest
    found = book.objection(delta_of(one, tokens, steps, base_digest=digest))
    return found[0] if found else None


def test_a_late_delta_takes_no_part_where_a_version_has_one_base():
    """Nor are its tokens in the scale: the average would be shorter than the others' mean."""
    made = book_of(TokensWeighting(), max_staleness=0, keep_versions=1, one_base=True)
    made.advance(2, "d2")
    late, fresh = key(1, base=1, client="a"), key(1, client="b")
    for one in (late, fresh):
        made.acknowledge(stored_of(one, tokens=8))
    merged, scale = made.begin_merge()
    assert {one.key: one.weight for one in merged} == {late: 0.0, fresh: 8.0}
    assert scale == 1 / 8


@pytest.mark.parametrize(
    ("offer", "code"),
    [
        ((key(1), 0, 2), "empty"),
        ((key(1), 8, 0), "empty"),
        ((key(1, base=3), 8, 2), "lineage"),
        ((key(1), 8, 2, "other"), "lineage"),
        ((key(1, base=0), 8, 2, "d0"), None),
    ],
)
def test_objections(book, offer, code):
    """A delta that would never be merged is refused before its transfer."""
    assert objection(book, *offer) == code


def test_digests_are_kept_for_many_versions_but_not_all(book):
    """A client that was away for hours is still of this lineage; memory stays bounded."""
    for version in range(3, 1000):
        book.advance(version, f"d{version}")
    assert len(book.digests) == REMEMBERED_VERSIONS + 1
    assert book.digests[999 - REMEMBERED_VERSIONS] == f"d{999 - REMEMBERED_VERSIONS}"


@pytest.mark.parametrize(("tokens", "steps"), [(MAX_TOKENS + 1, 2), (8, MAX_TOKENS + 1)])
def test_absurd_counts_are_refused(book, tokens, steps):
    """A huge weight would outweigh all other clients', and overflow the sum."""
    assert objection(book, key(1), tokens, steps) == "absurd"


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        ({"epsilon": 5.99}, None),
        ({"epsilon": 6}, None),
        ({"epsilon": 0.0}, None),
        ({"epsilon": 6.01}, "privacy"),
        ({}, "privacy"),
        ({"epsilon": -1.0}, "privacy"),
        ({"epsilon": float("nan")}, "privacy"),
        ({"epsilon": float("inf")}, "privacy"),
        ({"epsilon": "1"}, "privacy"),
        ({"epsilon": True}, "privacy"),
        ({"epsilon": None}, "privacy"),
    ],
)
def test_a_private_run_takes_deltas_within_its_budget_only(facts, code):
    """A task that trains without noise must not end up in the model by mistake."""
    private = book_of(TokensWeighting(), max_staleness=2, keep_versions=1, epsilon=6.0)
    private.advance(0, "d0")
    offer = evolve(delta_of(key(1, base=0), 8, 2, base_digest="d0"), facts=facts)
    assert (private.objection(offer) or (None,))[0] == code


def test_the_last_settled_key_stands_for_all_before_it(book):
    """A client goes on only after an answer, so the book does not keep every key.

    It must not call one merged that it does not know: an audit would find it lost.
    """
    book.settled.settle(key(5), "quarantined")
    book.settled.settle(key(4), "merged")
    assert book.settled.of(key(5)) == "quarantined"
    assert book.settled.of(key(4)) == "superseded"
    assert book.settled.of(key(5, base=1)) == "superseded"
    assert book.settled.of(key(6)) is None
    assert book.settled.of(key(9, incarnation=0)) == "superseded"
    assert objection(book, key(5)) == "quarantined"
    assert objection(book, key(9, incarnation=0)) == "superseded"
    assert not book.is_acknowledged(key(4))
    assert not book.is_acknowledged(key(5))


@pytest.mark.parametrize("how", ["received", "pending", "merged"])
@pytest.mark.parametrize("other", [{"sequence": 7}, {"sequence": 10**6, "base": 1}])
def test_a_number_that_does_not_grow_is_refused(book, how, other):
    """Such a key was never seen, so it is neither merged nor to be received after the other one."""
    last = key(10**6)
    if how == "received":
        book.receive(last)
    else:
        book.acknowledge(stored_of(last, tokens=8))
    if how == "merged":
        book.begin_merge()
        book.advance(3, "d3")
    assert objection(book, key(**other)) == "superseded"
    assert not book.is_acknowledged(key(**other))
    assert book.is_acknowledged(last) == (how != "received")
    assert objection(book, key(10**6 + 1)) is None
    assert objection(book, key(1, incarnation=2)) is None, "a new process counts from 1"


def latest_book(weighting="latest"):
    """A book of a run at version 0 that uses deltas again."""
    weighting, guard = weighting_named(weighting), NormGuard(guard_of(clip_norm=4.0))
    made = Deltas(
        weighting,
        max_staleness=2,
        keep_versions=1,
        reuses=True,
        counting=Counting(weighting, guard, own_pace=True),
    )
    made.advance(0, "d0")
    return made


def merge_of(book, version, *sent, norm=1.0):
    """Merge deltas of so many steps, from the newest version: (client, steps). What is used."""
    for name, steps in sent:
        one = stored_of(DeltaKey(name, 1, version - 1, version), norm, tokens=steps, steps=steps)
        book.acknowledge(one)
    _, scale = book.begin_merge()
    reused, tokens = book.reused, book.advance(version, f"d{version}")
    return {one.key.client: (one.staleness, one.weight) for one in reused}, scale, tokens


def test_newest_deltas_are_used_again():
    """Those of clients without a new one, each with the weight of its age, until it is too old."""
    book = latest_book()
    assert merge_of(book, 1, ("a", 10), ("b", 20)) == ({}, 15.0 / 2, 30)
    used, scale, tokens = merge_of(book, 2, ("a", 60))
    assert used == {"b": (1, pytest.approx(2**-0.5 / 20))}
    assert (scale, tokens) == (20.0 / 2, 60), "tokens count once, in the version that merged them"
    used, scale, _ = merge_of(book, 3, ("a", 30))
    assert used == {"b": (2, pytest.approx(3**-0.5 / 20))}
    assert merge_of(book, 4, ("c", 30))[0] == {"a": (1, pytest.approx(2**-0.5 / 30))}, "b is gone"
    used, scale, _ = merge_of(book, 5, ("b", 30), ("c", 30))
    assert used == {"a": (2, pytest.approx(3**-0.5 / 30))}
    assert scale == pytest.approx(30 / 3), "of three clients"


def test_in_fine_tuning_a_version_moves_as_far_as_its_new_work():
    """However many older deltas it also has."""
    book = latest_book("latest-tuned")
    assert merge_of(book, 1, ("a", 10), ("b", 10), ("c", 10))[1] == pytest.approx(10 / 3)
    used, scale, _ = merge_of(book, 2, ("a", 10))
    assert used == {name: (1, pytest.approx(2**-0.25 / 10)) for name in "bc"}
    assert scale == pytest.approx(10 / 3 / 3)
    assert merge_of(book, 3, ("a", 10), ("b", 10))[1] == pytest.approx(10 / 3 * 2 / 3)


def test_a_clipped_delta_stays_clipped():
    """Its weight when it was merged says by how much; a start restores it from the record."""
    book = latest_book()
    merge_of(book, 1, ("a", 10), norm=16.0)
    again = latest_book()
    again.recovered([], list(book._latest.values()))
    again.advance(1, "d1")
    for one in (book, again):
        assert merge_of(one, 2, ("b", 10))[0] == {"a": (1, pytest.approx(0.25 * 2**-0.5 / 10))}


def test_two_deltas_of_a_client_are_used_as_one():
    """The scale counts clients, and only the newest one is used again."""
    book = latest_book()
    for sequence, steps in ((1, 10), (2, 20)):
        book.acknowledge(stored_of(DeltaKey("a", 1, 0, sequence), steps=steps))
    assert book.begin_merge()[1] == 15.0
    book.abandon_merge()
    book.begin_merge()
    book.advance(1, "d1")
    assert merge_of(book, 2, ("b", 10))[0] == {"a": (1, pytest.approx(2**-0.5 / 20))}
    plain = book_of(weighting_named("anarchic"), max_staleness=2, keep_versions=1)
    plain.advance(0, "d0")
    merge_of(plain, 1, ("a", 10))
    assert merge_of(plain, 2, ("b", 10))[0] == {}


def test_a_delta_of_a_site_that_sends_seldom_counts_more():
    """By the last 64 arrivals, its own among them; a start with the same arrivals weighs alike."""
    book = book_of(weighting_named("arrivals"), max_staleness=2, keep_versions=1)
    book.advance(0, "d0")
    for version in range(1, 41):
        merge_of(book, version, ("a", 9), ("b", 1) if version > 38 else ("a2", 9))
    again = book_of(weighting_named("arrivals"), max_staleness=2, keep_versions=1)
    again.recovered([], arrivals=list(book._arrivals))
    again.advance(40, "d40")
    weights = []
    for one in (book, again):
        for name in ("a", "b"):
            one.acknowledge(stored_of(DeltaKey(name, 1, 40, 41)))
        merged, scale = one.begin_merge()
        weights.append([delta.weight * scale for delta in merged])
    assert weights == [[pytest.approx(64 / 3 / 32 / 2), pytest.approx(3.0 / 2)]] * 2


def test_weights_are_those_of_whole_deltas():
    """Mean steps, however many: the share of a site does not change with the steps of a delta."""
    book = latest_book()
    merge_of(book, 1, ("a", 10), ("b", 20))
    book.acknowledge(stored_of(DeltaKey("a", 1, 1, 2), steps=40))
    _, scale = book.begin_merge()
    assert book.weights(scale) == pytest.approx({"a": scale, "b": scale * 2**-0.5}), (
        "b's delta is used again"
    )


def merged_of(client, sequence=1, tokens=8, steps=2, norm=1.0, **facts):
    delta = delta_of(DeltaKey(client, 1, 0, sequence), tokens, steps)
    return MergedDelta(evolve(delta, facts=facts), 0, 1.0, norm)


def counted(merged, weighting="tokens", own_pace=False, **rules):
    """Each client's share of the average, the deltas as they count, and the lines."""
    one = weighting_named(weighting)
    made = Counting(one, NormGuard(guard_of(**rules)), own_pace)
    found, work, lines = made.count(merged)
    scale = one.scale(work, 2.0)
    shares = {}
    for delta in found:
        shares[delta.key.client] = shares.get(delta.key.client, 0.0) + scale * delta.weight
    return shares, found, lines


@pytest.mark.parametrize("weighting", [name for name in WEIGHTINGS if "latest" not in name])
def test_a_client_counts_once_in_a_version(weighting):
    """Its 26 deltas have the share of one, with every weighting."""
    flood = [merged_of("liar", number) for number in range(26)]
    shares, _, lines = counted([merged_of("a"), *flood, merged_of("b")], weighting)
    assert shares == pytest.approx(dict.fromkeys(["a", "liar", "b"], 1 / 3))
    assert lines == []


def test_tokens_count_up_to_a_multiple_of_the_median():
    """From the first version on, so that one client neither ends the run nor is all of it."""
    merged = [merged_of("a"), merged_of("b"), merged_of("liar", tokens=10**12)]
    _, found, lines = counted(merged, max_tokens_median=10.0)
    assert [one.delta.tokens for one in found] == [8, 8, 80]
    assert lines == ["80 of the 1000000000000 tokens that liar claims count: 10 x the median of 8"]
    assert [one.delta.tokens for one in counted(merged[1:], max_tokens_median=10.0)[1]] == [
        8,
        10**12,
    ], "between two there is no median"


def test_a_client_has_at_most_a_share_of_the_version():
    """A claim of ten times the tokens is believed in the books, and does not decide."""
    merged = [*(merged_of(name) for name in "abcd"), merged_of("liar", tokens=80)]
    shares, found, lines = counted(merged, max_share=0.33)
    assert shares == pytest.approx({**dict.fromkeys("abcd", 0.67 / 4), "liar": 0.33})
    assert found[-1].delta.tokens == 80
    assert lines == [
        "liar would have more of the version by tokens or labels, and counts as 33% of it"
    ]
    shares, _, _ = counted(merged[2:], max_share=0.33)
    assert shares["liar"] == pytest.approx(0.5), "of three 1.5 times an equal share"
    shares, _, lines = counted(merged[3:], max_share=0.33)
    assert (shares["liar"], lines) == (pytest.approx(80 / 88), []), "between two nothing is known"


@pytest.mark.parametrize("weighting", ["batch", "tokens", "fednova"])
def test_an_honest_version_has_the_weights_that_it_had(weighting):
    """To the bit: where no client has too much, nothing is multiplied."""
    merged = [
        merged_of(name, tokens=count) for name, count in zip("abcd", (8, 9, 10, 11), strict=True)
    ]
    limited, unlimited = (counted(merged, weighting, max_share=most) for most in (0.33, 0.0))
    assert limited == unlimited


def test_a_client_with_all_the_balance_has_twice_an_equal_share():
    """With sites of one label at 1 %, a liar would have half of the average."""
    merged = [
        *(merged_of(f"one{number}", balance=0.0) for number in range(8)),
        merged_of("mixed", balance=1.0),
        merged_of("liar", balance=1.0),
    ]
    shares, _, lines = counted(merged, max_share=0.33)
    assert shares["liar"] == shares["mixed"] == pytest.approx(0.2)
    assert "liar, mixed would have more of the version by tokens or labels" in lines[0]
    shares, _, _ = counted(merged[6:], max_share=0.33)
    assert shares["liar"] == pytest.approx(1 / 2.02), "of four with two mixed sites none is lowered"
    shares, _, lines = counted([merged_of(name, balance=0.2) for name in "abc"], max_share=0.33)
    assert (shares["a"], lines) == (pytest.approx(1 / 3), [])


def test_lies_of_several_deltas_are_those_of_their_mean():
    """Weights and what they are divided by are of the same work."""
    flood = [merged_of("liar", n, tokens=1 + 999 * n, steps=1 + 999 * (n == 0)) for n in range(2)]
    for weighting in ("batch", "tokens"):
        shares, _, _ = counted([*map(merged_of, "abcd"), *flood], weighting)
        assert sum(shares.values()) == pytest.approx(1.0)
    mixed = [merged_of("liar", n, balance=float(n)) for n in range(2)]
    sites = [merged_of(name, balance=0.0) for name in "abcd"]
    shares, _, _ = counted([*sites, *mixed], max_share=0.33)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["liar"] == pytest.approx(0.4)


def test_tokens_count_once_for_a_client_and_version():
    """However many deltas claim them."""
    flood = [merged_of("liar", number, tokens=80) for number in range(40)]
    _, found, lines = counted([*map(merged_of, "abc"), *flood], max_tokens_median=10.0)
    assert sum(one.delta.tokens for one in found) == 3 * 8 + 40 * 2
    assert len(lines) == 1


def test_what_is_clipped_is_said_in_one_line():
    """With norms, for at most some of them."""
    merged = [*(merged_of(f"c{number}") for number in range(11)), merged_of("far", norm=1e18)]
    _, found, lines = counted(merged, clip_median=1.5)
    assert lines == ["far's delta of norm 1e+18 counts as one of 1.5"]
    assert found[-1].weight == pytest.approx(8 * 1.5e-18)
    assert found[-1].clip == pytest.approx(1.5e-18)
    many = [merged_of(f"far{number}", norm=9.0 + number) for number in range(5)]
    _, _, lines = counted(merged[:11] + many, clip_median=1.5)
    assert lines[0].endswith("far3's delta of norm 12 counts as one of 1.5 and 1 more")


def of_vectors(vectors, weights):
    """Deltas with the norms of these vectors."""
    return [
        MergedDelta(
            Delta(DeltaKey(name, 1, 0, 1), "", 8, 2), 0, weight, float(np.linalg.norm(vector))
        )
        for name, vector, weight in zip("abcdef", vectors, weights, strict=False)
    ]


def test_it_is_the_weighted_mean_over_all_pairs():
    """Against the definition, with unequal weights and lengths."""
    rng = np.random.default_rng(2)
    vectors = rng.standard_normal((4, 50)) * np.array([[1], [3], [0.5], [2]]) + 0.4
    weights, scale = [1.0, 2.0, 5.0, 0.5], 0.3
    norm = float(np.linalg.norm(scale * np.einsum("i,ij->j", weights, vectors)))
    total = among = 0.0
    for i, one in enumerate(vectors):
        for j, other in enumerate(vectors):
            if i != j:
                share = weights[i] * weights[j]
                total += share * np.linalg.norm(one) * np.linalg.norm(other)
                among += share * float(one @ other)
    assert mean_cosine(of_vectors(vectors, weights), scale, norm) == pytest.approx(among / total)


def test_one_client_has_no_cosine():
    """Nor a round without work."""
    assert mean_cosine(of_vectors(np.ones((1, 8)), [1.0]), 1.0, np.sqrt(8)) is None
    assert mean_cosine([], 0.0, 0.0) is None


def test_two_rounds_without_a_change_are_one_line():
    """An optimizer of another model trains for days; one round may be a loss scale's search."""
    movement = Movement()
    assert movement.count(20, moved=False) == []
    (note,) = movement.count(30, moved=False)
    assert note.level == "warning"
    assert note.text.startswith("50 steps in 2 rounds changed no exchanged weight")
    for cause in ("optimizer", "GradScaler", "scaler.get_scale()", "gradients", "learning rate"):
        assert cause in note.text
    assert movement.count(30, moved=False) == []
    assert len(movement.count(1, moved=True)) == 1
    assert movement.count(1, moved=True) == []


def average(norms, **options):
    """The factors of deltas of 512 tokens in the average."""
    book = book_of(TokensWeighting(), max_staleness=4, keep_versions=3, **options)
    book.version = 0
    for number, norm in enumerate(norms):
        delta = Delta(DeltaKey(f"client-{number}", 1, 0, 1), "", 512, 20)
        book.acknowledge(StoredDelta(delta, 1, norm))
    merged, scale = book.begin_merge()
    return [one.weight * scale for one in merged]


def test_a_change_between_two_rounds_is_none_in_a_row():
    """A loss scale that is too high now and then is healthy."""
    movement = Movement()
    for _ in range(3):
        assert movement.count(5, moved=False) == []
        assert movement.count(5, moved=True) == []


def test_a_round_in_which_nothing_moves_makes_a_version():
    """At a learning rate of 0 the run goes on, and nothing is divided by 0."""
    assert average([0.0, 0.0]) == [0.0, 0.0]
