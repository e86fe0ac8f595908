"""The ledger: torn lines are cut off, damage is named, acknowledged facts stay."""

from pathlib import Path

import pytest

from fsl_async.files.checksummed_json import from_checksummed, to_checksummed
from fsl_async.files.files import Files
from fsl_async.files.memory_files import Faults, MemoryDisk, MemoryFiles
from fsl_async.store.book.book import Book
from fsl_async.store.disk.ledger import Ledger
from fsl_async.store.errors import LedgerDamaged, StoreError

NAMES = ["site-a", "b", "zürich"]


def opened(path, files=None, clock=lambda: 5.0):
    facts = []
    ledger = Ledger(files or Files(), path, lambda: 12.3456, clock)
    notice = ledger.open(facts.append)
    return ledger, facts, notice


@pytest.fixture
def path(run_root):
    path = run_root / "ledger.jsonl"
    ledger, _, _ = opened(path)
    for index, name in enumerate(NAMES):
        ledger.append("lease", {"name": name, "index": index})
    ledger.close()
    return path


def test_served_time_adds_up_over_processes(path):
    """It adds up over restarts; downtime and the wall clock do not count."""
    for begun, worked in ((1000.0, 40.0), (7.0, 2.5)):
        now = [begun]
        ledger, _, _ = opened(path, clock=lambda now=now: now[0])
        now[0] += worked
        ledger.append("lease", {"name": "more", "index": 9})
        now[0] += 100.0  # after the last line: lost
        ledger.close()
    ledger, facts, _ = opened(path)
    ledger.close()
    assert ledger.served_before_s == 42.5
    assert [fact["up"] for fact in facts[-2:]] == [40.0, 42.5]


def test_a_torn_last_line_is_cut_at_every_length(path):
    """A crash may leave any part of the last line; the lines before survive, new ones follow."""
    data = path.read_bytes()
    last = data[: data.rindex(b"\n", 0, -1) + 1]
    for size in range(len(last) + 1, len(data)):
        path.write_bytes(data[:size])
        ledger, facts, notice = opened(path)
        assert len(facts) == 2
        assert f"{size - len(last)} bytes" in notice
        ledger.append("lease", {"name": "c", "index": 2})
        ledger.close()
        ledger, facts, notice = opened(path)
        ledger.close()
        assert [fact["name"] for fact in facts] == ["site-a", "b", "c"]
        assert notice is None


@pytest.mark.parametrize("line", [1, 2, 3])
def test_a_flipped_bit_is_named(path, line):
    """Damage to acknowledged facts stops the ps; guessing would lose or double a client's work."""
    data = path.read_bytes()
    begin = sum(map(len, data.splitlines(keepends=True)[: line - 1]))
    end = data.index(b"\n", begin)
    for position in range(begin, end + 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 0x10]) + data[position + 1 :])
        with pytest.raises(LedgerDamaged, match=f"line {line} is damaged") as caught:
            opened(path)
        assert caught.value.line == line


def test_zeros_at_the_end_are_a_torn_line(path):
    """After a power cut the last block may hold zeros instead of the line."""
    path.write_bytes(path.read_bytes() + bytes(100))
    ledger, facts, notice = opened(path)
    ledger.close()
    assert len(facts) == 3
    assert "100 bytes" in notice


def test_a_ledger_longer_than_one_read_is_complete(path, monkeypatch):
    """A line across two reads is not taken for a torn one."""
    monkeypatch.setattr("fsl_async.store.disk.ledger._PIECE_BYTES", 7)
    ledger, facts, notice = opened(path)
    ledger.close()
    assert [fact["name"] for fact in facts] == NAMES
    assert notice is None


def test_two_processes_cannot_share_a_run(path):
    """Two parameter servers on one directory would fork the run."""
    ledger, _, _ = opened(path)
    with pytest.raises(StoreError, match="another process uses"):
        opened(path)
    ledger.close()
    opened(path)[0].close()


def test_a_closed_ledger_refuses_facts(path):
    """A late call must not write to a descriptor that has been reused."""
    ledger, _, _ = opened(path)
    ledger.close()
    ledger.close()
    with pytest.raises(StoreError, match="closed"):
        ledger.append("lease", {"name": "x", "index": 1})


def test_a_failed_append_leaves_no_trace():
    """Half a line from a full disk must not stay in the middle of the ledger."""
    for failures in (1, 2, 3):
        # Calls: create, sync_directory, write and sync of the first line; then those that fail.
        files = MemoryFiles(MemoryDisk(), Faults(5, "error", failures=failures))
        ledger, _, _ = opened(Path("/ledger.jsonl"), files)
        ledger.append("lease", {"name": "a", "index": 0})
        for _ in range(failures):
            with pytest.raises(OSError, match="No space"):
                ledger.append("lease", {"name": "b" * 500, "index": 1})
        ledger.append("lease", {"name": "c", "index": 1})
        ledger.close()
        ledger, facts, notice = opened(Path("/ledger.jsonl"), files)
        ledger.close()
        assert [fact["name"] for fact in facts] == ["a", "c"]
        assert notice is None


def test_a_checksum_detects_every_single_byte_error():
    """The checksum covers the complete line."""
    line = to_checksummed({"fact": "lease", "name": "é\n", "index": 3})
    assert b"\n" not in line
    assert from_checksummed(line) == {"fact": "lease", "name": "é\n", "index": 3}
    for position in range(len(line)):
        for wrong in (line[position] ^ 1, 0):
            assert from_checksummed(line[:position] + bytes([wrong]) + line[position + 1 :]) is None
    assert from_checksummed(b"") is None
    assert from_checksummed(line[:-1]) is None


def test_numbers_that_json_lacks_are_refused():
    """NaN in a ledger line would make it unreadable for every other tool."""
    with pytest.raises(ValueError, match="JSON"):
        to_checksummed({"norm": float("nan")})


def test_an_unknown_fact_stops_an_old_release():
    """If it skipped an unknown fact, an old release might merge a delta twice."""
    with pytest.raises(StoreError, match="newer release"):
        Book(3).apply({"fact": "forked"})


def test_a_zero_inside_a_complete_line_is_damage(path):
    """A torn write leaves zeros up to its end or a block's end, never one inside a synced line."""
    data = path.read_bytes()
    begin = data.rindex(b"\n", 0, -1) + 1
    for position in range(begin, len(data) - 1):
        path.write_bytes(data[:position] + b"\0" + data[position + 1 :])
        with pytest.raises(LedgerDamaged):
            opened(path)


def test_a_line_whose_block_was_not_written_is_torn(path):
    """The file has its new length, but only one of two blocks was written."""
    line = to_checksummed({"fact": "lease", "name": "x" * 2000})
    begin = path.stat().st_size
    block = -(-begin // 512) * 512 - begin
    torn = line[:block] + bytes(512) + line[block + 512 :] + b"\n"
    path.write_bytes(path.read_bytes() + torn)
    ledger, facts, notice = opened(path)
    ledger.close()
    assert len(facts) == 3
    assert "torn by a crash" in notice


def test_without_syncs_a_power_cut_may_tear_several_lines(path):
    """A block of zeros before whole lines is damage only where each line was synced."""
    first, *others = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + bytes(512 - len(first)) + b"".join(others))
    with pytest.raises(LedgerDamaged, match="line 2 is damaged"):
        opened(path)
    facts = []
    ledger = Ledger(Files(), path, syncs=False)
    assert "torn by a crash" in ledger.open(facts.append)
    ledger.close()
    assert [fact["name"] for fact in facts] == NAMES[:1]
    assert path.read_bytes() == first


def test_a_removed_or_emptied_ledger_acknowledges_nothing(path):
    """Further lines would go into a file without a name, or without the lines before them."""
    ended = []
    ledger = Ledger(Files(), path, gone=ended.append)
    ledger.open(lambda _: None)
    ledger.append("lease", {"name": "early", "index": 1})
    before = path.read_bytes()
    for change in (lambda: path.write_bytes(before[:-1]), path.unlink):
        change()
        with pytest.raises(StoreError, match="removed, replaced or emptied while the run went on"):
            ledger.append("lease", {"name": "late", "index": 9})
    assert len(ended) == 2
    ledger.close()
