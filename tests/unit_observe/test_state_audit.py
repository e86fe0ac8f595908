"""The audit of the ledger finds each fault in ledgers changed by hand."""

import pytest

from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.observe.journal_lines import encode
from fsl_async.observe.ledger_audit import acknowledged_keys, audit, audit_run


def accepted(key, tokens=10):
    """Make a ledger line of an accepted delta."""
    return {"fact": "accepted", "key": key, "tokens": tokens}


def version(number, total, *entries):
    """Make a ledger line of a version that merged (key, tokens) each."""
    merged = [{"key": key, "tokens": tokens} for key, tokens in entries]
    return {"fact": "version", "version": number, "tokens_total": total, "merged": merged}


GOOD = [
    version(0, 0),
    accepted("a/1/0/1"),
    accepted("b/1/0/1", 20),
    version(1, 30, ("a/1/0/1", 10), ("b/1/0/1", 20)),
    accepted("a/1/1/2", 5),
    {"fact": "quarantined", "key": "b/1/1/2", "tokens": 1, "reason": "NaN"},
]


def test_a_good_ledger_is_clean():
    """Merged, pending and quarantined deltas are all accounted for."""
    result = audit(GOOD, ["a/1/0/1", "b/1/0/1", "a/1/1/2"])
    assert result.is_clean, result.complaints()
    counted = (result.versions, result.merged, result.tokens, result.pending, result.quarantined)
    assert counted == (1, 2, 30, 1, 1)


def test_an_acknowledged_delta_that_the_ledger_lacks_is_lost():
    """A client forgets its delta after the acknowledgement."""
    result = audit(GOOD, ["a/1/0/1", "c/1/0/1"])
    assert result.lost == ("c/1/0/1",)
    assert "1 acknowledged delta is lost: c/1/0/1" in result.complaints()


def test_a_pending_delta_without_its_file_is_lost():
    """Pending means that it can still be merged."""
    result = audit(GOOD, [], in_spool=lambda _: False)
    assert (result.lost, result.pending) == (("a/1/1/2",), 0)


def test_a_delta_that_a_start_found_missing_is_lost():
    """It was acknowledged, and is not kept aside on purpose."""
    gone = {"fact": "quarantined", "key": "a/1/1/2", "tokens": 5, "reason": "gone", "lost": True}
    result = audit([*GOOD, gone], ["a/1/1/2"])
    assert (result.lost, result.pending, result.quarantined) == (("a/1/1/2",), 0, 1)


def test_a_key_in_two_versions_is_doubled():
    """A delta is merged at most once."""
    again = version(2, 45, ("a/1/1/2", 5), ("a/1/0/1", 10))
    result = audit([*GOOD, again], [])
    assert result.doubled == ("a/1/0/1",)
    assert not result.is_clean


def test_versions_that_a_rollback_made_void_do_not_count():
    """After a fallback the same delta is merged again, once in the new lineage."""
    rollback = {"fact": "rollback", "from": 1, "to": 0, "pending": [], "gone": ["b/1/0/1"]}
    redone = version(1, 10, ("a/1/0/1", 10))
    result = audit([*GOOD, rollback, redone], ["a/1/0/1", "b/1/0/1"])
    assert (result.doubled, result.lost, result.merged) == ((), (), 1)


def test_a_version_that_only_a_checkpoint_has_counts():
    """A parameter server may be killed between the rename and the ledger line."""
    manifest = version(2, 35, ("a/1/1/2", 5))
    result = audit(GOOD, ["a/1/1/2"], manifests=[manifest])
    assert (result.is_clean, result.versions, result.pending) == (True, 2, 0)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([*GOOD, version(2, 99, ("a/1/1/2", 5))], "states 99 tokens"),
        ([*GOOD, version(2, 36, ("a/1/1/2", 6))], "counts 6 tokens"),
        ([*GOOD, version(2, 31, ("x/1/1/2", 1))], "never accepted"),
        ([*GOOD, version(2, 31, ("b/1/1/2", 1)), accepted("b/1/1/2", 1)], "in quarantine"),
        ([*GOOD, version(3, 35, ("a/1/1/2", 5))], "version 2 is in neither"),
        ([*GOOD, accepted("a/1/1/2", 5)], "accepted twice"),
        ([*GOOD, version(1, 30)], "version 1 twice"),
    ],
)
def test_contradictions_are_reported(facts, words):
    """Numbers that contradict each other are reported, not only keys."""
    assert any(words in problem for problem in audit(facts, []).problems)


def test_a_checkpoint_that_contradicts_the_ledger_is_reported():
    """One call writes both, so a difference is damage."""
    result = audit(GOOD, [], manifests=[version(1, 10, ("a/1/0/1", 10))])
    assert "disagree about what version 1 merged" in result.problems[0]


def test_both_journals_show_what_was_acknowledged(tmp_path):
    """The client's journal shows acknowledgements that the server's journal may have lost."""
    lines = [
        {"type": "send", "peer": "a", "message": {"type": "accepted/1", "key": "a/1/0/1"}},
        {"type": "send", "peer": "a", "message": {"type": "call/1", "round": 1}},
        {"type": "accepted", "key": "a/1/0/2"},
        {"type": "send", "message": 3},
        {"type": "note", "text": "DeltaAcknowledged, Accepted"},
    ]
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(encode(line) + "\n" for line in lines))
    assert list(acknowledged_keys(journal)) == ["a/1/0/1", "a/1/0/2"]


@pytest.fixture
def run_dir(tmp_path):
    write_ledger(tmp_path, GOOD)
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "a@1@1@2.frames").write_bytes(b"x")
    told = [{"type": "accepted", "key": "a/1/0/1"}]
    client = tmp_path / "clients" / "a"
    client.mkdir(parents=True)
    (client / "journal.jsonl").write_text("".join(encode(line) + "\n" for line in told))
    return tmp_path


def write_ledger(run_dir, facts):
    """Write facts with checksums, as the server does."""
    (run_dir / "ledger.jsonl").write_bytes(b"".join(to_checksummed(fact) + b"\n" for fact in facts))


def test_a_line_cut_out_of_the_ledger_is_found_by_the_clients_journal(run_dir):
    """A checksum cannot show that the facts about a delta were removed."""
    write_ledger(run_dir, [GOOD[0], GOOD[2], version(1, 20, ("b/1/0/1", 20))])
    assert audit_run(run_dir).lost == ("a/1/0/1",)


def test_a_changed_byte_in_the_ledger_is_reported_and_a_torn_end_is_not(run_dir):
    """A torn last line was never acknowledged; any other damage is reported."""
    ledger = run_dir / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"fact":"acc')
    assert audit_run(run_dir).is_clean
    ledger.write_bytes(whole.replace(b'"tokens":20', b'"tokens":21', 1))
    assert any("line 3 of ledger.jsonl" in problem for problem in audit_run(run_dir).problems)


def test_a_damaged_checkpoint_manifest_is_reported(run_dir):
    """The manifest records what a version merged."""
    folder = run_dir / "checkpoints" / "v00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}\n")
    assert "v00000001/manifest.json" in audit_run(run_dir).problems[0]
