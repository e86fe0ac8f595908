"""The book of a ledger: bounded memory, and the answers of one that forgets nothing."""

import json
import random
from types import SimpleNamespace

import numpy as np
from deltas import delta_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey, StoredDelta
from fsl_async.roles.sync.deltas import REMEMBERED_VERSIONS
from fsl_async.store.book.book import MOST_QUARANTINED, REMEMBERED, Book
from fsl_async.store.book.records import to_fact

NAMES = ["a", "b", "c"]
REUSE = 5
"""Versions that a delta which is used again may be old."""


class Facts:
    """Random facts in the order in which a parameter server records them."""

    def __init__(self, rng, keep_versions):
        self.rng, self.keep_versions = rng, keep_versions
        self.lines = []
        self.records = {}
        self.sequences = dict.fromkeys(NAMES, 0)
        self.incarnations = dict.fromkeys(NAMES, 1)
        self.keys = []
        self.excluded = set()
        """Those that were ever quarantined."""
        self.all = Book(10**9, reuse=REUSE)  # it forgets nothing
        self.add("run", run="r")
        self.version()

    def add(self, fact, **members):
        """Record a fact."""
        line = {"at": 1000.5 + len(self.lines), "up": float(len(self.lines)), "fact": fact}
        self.lines.append(line | members)
        self.all.apply(self.lines[-1])

    def accepted(self, name=None):
        """Add a delta of a client that has none pending."""
        free = {key.client for key in self.all.pending}.symmetric_difference(NAMES)
        if not free:
            return
        name = name or self.rng.choice(sorted(free))
        if self.rng.random() < 0.05:
            self.incarnations[name] += 1
            self.sequences[name] = 0
            self.add("incarnation", name=name, incarnation=self.incarnations[name])
        self.sequences[name] += 1
        numbers = self.incarnations[name], self.all.version, self.sequences[name]
        self.keys.append(key := DeltaKey(name, *numbers))
        delta = delta_of(key, self.rng.randrange(1, 99), metrics={"loss": 0.1 + len(self.lines)})
        self.add("accepted", **to_fact(StoredDelta(delta, 99, self.rng.random(), "d" * 64)))

    def quarantined(self):
        """Take a pending delta out."""
        if self.all.pending:
            delta = self.all.pending[self.rng.choice(list(self.all.pending))]
            self.excluded.add(delta.key)
            held = {"held": True} if self.rng.random() < 0.6 else {}
            self.add("quarantined", **to_fact(delta), reason="odd", **held)

    def released(self):
        """Release one of those held last."""
        recent = list(self.all.held)[-3:]
        if recent:
            self.add("released", **to_fact(self.all.held[self.rng.choice(recent)]))

    def version(self):
        """Merge all that is pending."""
        number = self.all.version + 1
        merged = list(self.all.pending.values())
        record = {
            "version": number,
            "digest": f"{number}-{len(self.lines)}",
            "tokens_total": self.all.tokens_total + sum(one.delta.tokens for one in merged),
        }
        self.records[number] = SimpleNamespace(**record)
        entries = [
            {"key": one.key.text, "staleness": number - 1 - one.key.base, "weight": 1 / number}
            for one in merged
        ]
        self.add("version", **record, merged=entries)

    def rollback(self, *, deep):
        """Go back as a start does: by a book that has all that is needed for it."""
        newest = self.all.version
        oldest = 0 if deep else max(0, newest - self.keep_versions)
        target = self.rng.randrange(oldest, newest + 1)
        book = self.book(since=target)
        assert book.forgotten <= target
        holds = lambda _: self.rng.random() < 0.7  # noqa: E731
        self.add("rollback", **book.rollback_to(self.records[target], holds, {}))

    def others(self):
        """Record facts that hold other state."""
        self.add("lease", name=self.rng.choice(NAMES), index=self.rng.randrange(3))
        limits = {"rounds": 9, "tokens": 0, "seconds": 0.0}
        self.add("decay", decays_from=self.rng.random(), limits=limits, planned=limits)

    def book(self, lines=None, since=None):
        """Return the book after the lines."""
        book = Book(self.keep_versions, reuse=REUSE)
        book.since = since
        for line in self.lines if lines is None else lines:
            book.apply(line)
        return book

    def play(self, steps):
        """Record random facts."""
        choices = [self.accepted] * 40 + [self.version] * 20 + [self.quarantined] * 4
        choices += [self.released] * 3 + [self.others]
        for _ in range(steps):
            self.rng.choice(choices)()
            if self.rng.random() < 0.02:
                self.rollback(deep=self.rng.random() < 0.3)
        return self


def order(key):
    return key.incarnation, key.sequence


@settings(deadline=None, max_examples=120)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(10, 250))
@example(2**32 - 1, 3, 236)  # a client's newest delta is too old, and one before it is not
def test_a_book_that_forgets_answers_like_one_that_does_not(seed, keep_versions, steps):
    """No delta is lost or merged twice because its version was forgotten."""
    facts = Facts(random.Random(seed), keep_versions).play(steps)
    book, whole = facts.book(), facts.all
    names = ["version", "version_at", "began_s", "tokens_total", "pending", "accepted"]
    names += ["generation", "rollback_targets", "decay", "leases", "incarnations", "run", "held"]
    for name in names:
        assert getattr(book, name) == getattr(whole, name), name
    known = {one.key for one in book.usual}  # of the newest version all that is not forgotten
    assert known <= {one.key for one in whole.usual}
    assert known >= {one.key for one in whole.accepted if one.key in whole.merged}
    assert book.digests[book.version] == whole.digests[whole.version]
    for version in range(max(book.forgotten, 0), book.version + 1):
        assert book.merged_after(version) == whole.merged_after(version)
        assert book.latest.at(version) == whole.latest.at(version)
        needed = [{one.key for one in of.latest.needed_from(version)} for of in (book, whole)]
        assert needed[0] == needed[1]
    newest = dict.fromkeys(NAMES, (0, 0))
    for key in facts.keys:
        if key in facts.excluded or whole.known(key) == "merged":
            newest[key.client] = max(order(key), newest[key.client])
    for key in facts.keys:
        expected, found = whole.known(key), book.known(key)
        past = {"superseded"} if order(key) < newest[key.client] else set()
        if expected in {"merged", "accepted"} or order(key) > newest[key.client]:
            assert found in {expected} | past
            continue
        # It was quarantined, and is perhaps gone in a rollback after its release.
        assert found in {expected} | past | ({"quarantined"} if key in facts.excluded else set())
    for name in NAMES:
        following = DeltaKey(name, facts.incarnations[name], 0, facts.sequences[name] + 1)
        assert book.known(following) is None
    assert {k: v for k, v in book.outcomes().items() if k in book.pending} == {}


def test_a_book_does_not_grow():
    """After 4000 versions it is as large as after 1000."""
    facts, sizes = Facts(random.Random(1), 3), []
    book = facts.book()
    for number in range(1, 4001):
        begin = len(facts.lines)
        for name in NAMES:
            facts.accepted(name)
        if number % 3 == 0:
            facts.quarantined()
        facts.version()
        for line in facts.lines[begin:]:
            book.apply(line)
        del facts.lines[1:]
        if number in {1000, 4000}:
            fields = {
                name: value for name, value in vars(book).items() if hasattr(value, "__len__")
            }
            sizes.append({name: len(value) for name, value in fields.items()})
    assert sizes[0]["held"] <= 3 * MOST_QUARANTINED
    assert sizes[1] == sizes[0] | {"quarantined": sizes[1]["quarantined"]}
    assert len(book.merged) <= REMEMBERED + 9
    assert len(book.digests) == REMEMBERED_VERSIONS


def test_time_before_version_0_is_that_of_its_line():
    """`run.seconds` counts from there; a later version must not move it."""
    book = Book(3)
    for version, up in ((0, 3.5), (1, 9.0)):
        book.line_written({"fact": "version", "version": version, "up": up, "at": 100.0 + up})
    assert (book.began_s, book.version_at) == (3.5, 109.0)


# --- in a run ---


def rounds(run, first, last):
    return [run.round(version, *NAMES).digest for version in range(first, last + 1)]


def test_a_version_that_was_kept_for_a_client_can_be_gone_back_to(make_run):
    """It is older than what a start remembers otherwise."""
    run = make_run(keep_versions=1)
    run.start()
    run.store.keep_from(1)
    digests = rounds(run, 1, 5)
    run.close()
    recovered = run.open(from_version=2)
    assert (recovered.version, recovered.digest) == (2, digests[1])
    assert recovered.tokens_total == 60
    assert len([*recovered.pending, *facts_of(run)[-1]["gone"]]) == 9
    assert {key.base for key in recovered.settled} <= {0, 1}
    for key in (DeltaKey.parse(key) for key in facts_of(run)[-1]["gone"]):
        assert run.store.known(key) is None
    assert run.store.known(DeltaKey("a", 1, 1, 2)) == "merged"
    run.close()
    assert audit_run(run.root).is_clean


def facts_of(run):
    return [json.loads(line) for line in (run.root / "ledger.jsonl").read_bytes().splitlines()]


def test_a_held_delta_of_long_ago_is_kept_and_released(make_run):
    """Its client has settled others since, and its file must not be taken for a leftover."""
    run = make_run(keep_versions=1)
    run.start()
    first = DeltaKey("a", 1, 0, 1)
    run.send(first, np.ones(run.manifest.values, np.float32))
    run.store.run.quarantine(first, "odd", held=True)
    for version in range(1, 5):
        key = DeltaKey("a", 1, version - 1, version + 1)
        run.send(key, np.ones(run.manifest.values, np.float32))
        run.commit(key)
    run.close()
    name = "a@1@0@1.frames"
    # A crash between the move and the line: it is moved back.
    (run.root / "quarantine" / name).rename(run.root / "spool" / name)
    recovered = run.open()
    assert [one.key for one in recovered.held] == [first]
    assert run.store.known(first) == "quarantined"
    assert (run.root / "quarantine" / name).exists()
    run.store.run.release(first)
    recovered = run.open()
    assert [one.key for one in recovered.pending] == [first]
    run.commit(first)
    assert audit_run(run.root).is_clean
