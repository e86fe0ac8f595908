"""The ledger's state: a start from it equals one from all lines, and nothing depends on it."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from attrs import evolve
from deltas import delta_of
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ledger_books import check_state

from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.files.files import Files
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey, StoredDelta
from fsl_async.roles.sync.deltas import REMEMBERED_VERSIONS
from fsl_async.store.book import book as book_module
from fsl_async.store.book.book import MOST_QUARANTINED, REMEMBERED, Book
from fsl_async.store.book.records import to_fact
from fsl_async.store.disk import ledger as ledger_module
from fsl_async.store.errors import LedgerDamaged

NAMES = ["a", "b", "c"]
STATE = "ledger.state"
REUSE = 5
"""Versions that a delta which is used again may be old."""


# --- the book ---


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
def test_a_saved_book_continues_as_if_it_had_read_all_lines(seed, keep_versions, steps):
    """At any line of any history; JSON is what the file holds."""
    facts = Facts(random.Random(seed), keep_versions).play(steps)
    cut = facts.rng.randrange(len(facts.lines) + 1)
    book = Book.from_json(facts.book(facts.lines[:cut]).to_json())
    for line in facts.lines[cut:]:
        book.apply(line)
    whole = facts.book()
    assert book.to_json() == whole.to_json()
    assert vars(book).keys() == vars(whole).keys()
    for name in vars(book).keys() - {"_appliers"}:
        assert getattr(book, name) == getattr(whole, name), name


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


# --- the file ---


def rounds(run, first, last):
    return [run.round(version, *NAMES).digest for version in range(first, last + 1)]


def reopened(run):
    """What a start finds, whatever the time is."""
    return evolve(run.open(), since_version_s=0.0)


@pytest.fixture
def saved(make_run):
    """A run with a state after every version."""
    run = make_run(keep_versions=2, state_growth=0.0)
    run.start()
    run.digests = rounds(run, 1, 5)
    run.close()
    return run


def test_a_start_reads_the_end_only(saved, monkeypatch):
    """Lines before the state are not even looked at; the audit reads all of them."""
    monkeypatch.setattr(ledger_module, "_TAIL_BYTES", 500)
    saved.open()
    rounds(saved, 6, 6)
    saved.close()
    ledger = saved.root / "ledger.jsonl"
    data = bytearray(ledger.read_bytes())
    data[300] ^= 1
    ledger.write_bytes(data)
    recovered = saved.open()
    assert (recovered.version, saved.store.notices) == (6, ())
    assert recovered.digests[3] == saved.digests[2]
    rounds(saved, 7, 7)
    saved.close()
    (problem, *_) = audit_run(saved.root).problems
    assert "of ledger.jsonl does not match its checksum" in problem
    (saved.root / STATE).unlink()
    with pytest.raises(LedgerDamaged):
        saved.open()


@pytest.mark.parametrize("change", ["flip", "torn", "format", "ledger", "members", "unreadable"])
def test_a_useless_state_is_noted_once(saved, change):
    """It is a cache: the whole ledger has all that it has."""
    before = reopened(saved)
    saved.close()
    path = saved.root / STATE
    data = path.read_bytes()
    altered = {
        "flip": data.replace(b'"version":5', b'"version":4', 1),
        "torn": data[: len(data) // 2],
        "format": with_checksum(data, b'"format":1', b'"format":2'),
        "ledger": with_checksum(data, b'"tail":"', b'"tail":"0'),
        "members": with_checksum(data, b'"pending"', b'"waiting"'),
    }
    if change == "unreadable":
        path.unlink()
        path.mkdir()
    else:
        assert altered[change] != data
        path.write_bytes(altered[change])
    assert reopened(saved) == before
    first = list(saved.store.notices)
    assert first[0].startswith("ledger.state ")
    assert first[0].endswith("the whole ledger was read")
    if change == "unreadable":
        assert "ledger.state cannot be written" in first[1]
        return
    assert len(first) == 1
    saved.open()
    assert saved.store.notices == ()


def with_checksum(data, old, new):
    members = json.loads(data.replace(old, new, 1))
    del members["crc"]
    return to_checksummed(members) + b"\n"


def test_a_ledger_from_a_backup_is_read_completely(saved):
    """It ends before the state does, or goes on with other lines."""
    ledger = saved.root / "ledger.jsonl"
    whole = ledger.read_bytes()
    lines = whole.splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[:-1]))  # as a crash before the last version's line
    recovered = saved.open()
    assert (recovered.version, recovered.digest) == (5, saved.digests[4])
    assert "ledger.state is not of this ledger: the whole ledger was read" in saved.store.notices
    saved.close()
    assert ledger.read_bytes() != whole, "the line was written at another time"
    assert check_state(saved.root)


def test_a_version_that_was_kept_for_a_client_can_be_gone_back_to(make_run):
    """It is older than what the state has: the whole ledger says what was merged since."""
    run = make_run(keep_versions=1, state_growth=0.0)
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
    assert check_state(run.root)
    assert audit_run(run.root).is_clean


def test_lines_after_the_state_are_not_forgotten_where_they_are_gone_back_to(make_run, monkeypatch):
    """The state reaches back to the version, and the lines since are more than are kept."""
    monkeypatch.setattr(book_module, "REMEMBERED", 2)
    run = make_run(keep_versions=1, state_growth=0.0)
    run.start()
    run.store.keep_from(1)
    digests = rounds(run, 1, 2)
    state = (run.root / STATE).read_bytes()
    digests += rounds(run, 3, 5)
    run.close()
    (run.root / STATE).write_bytes(state)
    recovered = run.open(from_version=2)
    assert run.store.notices[0].startswith("rolled back from version 5 to 2")
    assert (recovered.version, recovered.digest, recovered.tokens_total) == (2, digests[1], 60)
    assert len([*recovered.pending, *facts_of(run)[-1]["gone"]]) == 9
    run.close()
    assert audit_run(run.root).is_clean


def facts_of(run):
    return [json.loads(line) for line in (run.root / "ledger.jsonl").read_bytes().splitlines()]


class NoState(Files):
    """A disk without space for the state."""

    def replace_whole(self, path, data):
        """Fail: only the state is written so."""
        raise OSError(28, "No space left on device")


def test_a_state_that_cannot_be_written_costs_a_notice(saved):
    """The version is there, and the old state still fits."""
    saved.open(files=NoState())
    done = saved.round(6, "a")
    assert done.version == 6
    assert "No space left" in done.notice
    saved.close()
    assert check_state(saved.root)
    assert saved.open().version == 6


def test_the_state_is_saved_when_the_lines_since_are_longer(make_run):
    """Not every commit pays for it, and a start never reads much."""
    run = make_run(keep_versions=1)
    run.start()
    path, saves, longest = run.root / STATE, 0, 0.0
    for version in range(1, 41):
        before = path.read_bytes()
        run.round(version, "a", "b")
        state = path.read_bytes()
        saves += state != before
        since = (run.root / "ledger.jsonl").stat().st_size
        since -= json.loads(state)["ledger"]["bytes"]
        longest = max(longest, since / len(state))
    assert 1.0 < longest <= 2.0
    assert 1 < saves < 12
    run.close()
    assert check_state(run.root)
    state = path.read_bytes()
    run.open()
    assert path.read_bytes() == state, "a start saves it only when that is due"


def test_a_held_delta_of_long_ago_is_kept_and_released(make_run):
    """Its client has settled others since, and its file must not be taken for a leftover."""
    run = make_run(keep_versions=1, state_growth=0.0)
    run.start()
    first = DeltaKey("a", 1, 0, 1)
    run.send(first, np.ones(run.manifest.values, np.float32))
    run.store.quarantine(first, "odd", held=True)
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
    run.store.release(first)
    recovered = run.open()
    assert [one.key for one in recovered.pending] == [first]
    run.commit(first)
    assert audit_run(run.root).is_clean
