"""The book of deltas: each is merged once, with its staleness, or never, with a reason."""

import pytest
from attrs import evolve
from configs import book_of, guard_of
from deltas import delta_of, stored_of

from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.roles.sync.deltas import MAX_TOKENS, REMEMBERED_VERSIONS, Counting, DeltaBook
from fsl_async.roles.sync.norm_guard import NormGuard
from fsl_async.roles.sync.weighting import TokensWeighting, weighting_named


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


def latest_book(**rules):
    """A book of a run at version 0 that uses deltas again."""
    weighting, guard = weighting_named("latest"), NormGuard(guard_of(clip_norm=4.0))
    made = DeltaBook(
        weighting,
        max_staleness=2,
        keep_versions=1,
        reuses=True,
        counting=Counting(weighting, guard, own_pace=True),
        **rules,
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
