"""The file with the run's members for the next parameter server."""

import asyncio
import threading

import pytest

from fsl_async.cluster.relauncher import FILE, MembersFile, MembersKeeper
from fsl_async.cluster.restarts import MOST_MEMBERS
from fsl_async.errors import RunDirError
from fsl_async.files.checksummed_json import to_checksummed


def test_what_is_written_is_read(tmp_path):
    """Each write replaces the file; without a file there are no members."""
    file = MembersFile(tmp_path / FILE)
    assert file.read() == frozenset()
    for names in ({"b", "a-1.x_2"}, {"c"}, set()):
        file.write(names)
        assert MembersFile(file.path).read() == names
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("bad", ["\xff\xfe", "a b", "../x/y", "a\n", "n" * 65])
def test_invalid_names_are_skipped(tmp_path, bad):
    """Names become arguments of commands."""
    (tmp_path / FILE).write_bytes(to_checksummed({"members": ["a", bad, "b"]}))
    assert MembersFile(tmp_path / FILE).read() == {"a", "b"}


def test_a_file_that_was_altered_is_refused(tmp_path):
    """Another letter makes it another client's name, for which a program would be launched."""
    file = MembersFile(tmp_path / FILE)
    file.write({"site-a", "site-b"})
    whole = file.path.read_bytes()
    assert whole == b'{"members":["site-a","site-b"],"crc":"f7b3b65d"}\n'
    for bad in (whole.replace(b"-b", b"-c"), whole[7:], b"site-a\n", whole[:-2], whole + b"x\n"):
        file.path.write_bytes(bad)
        with pytest.raises(RunDirError, match=r"members\.json does not match its checksum; remove"):
            file.read()
    file.path.write_bytes(b"")
    assert file.read() == frozenset()


def test_a_disk_that_takes_nothing_leaves_it_as_it_was(tmp_path):
    """The error must be raised, and the old file remain."""
    file = MembersFile(tmp_path / FILE)
    file.write({"a"})
    (tmp_path / f".{FILE}.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        file.write({"b"})
    assert file.read() == {"a"}


def test_a_file_of_any_size_is_read_within_bounds(tmp_path):
    """Another program may have written the file: it must not fill the memory."""
    path = tmp_path / FILE
    names = [f"c{number}" for number in range(MOST_MEMBERS + 7)]
    path.write_bytes(to_checksummed({"members": names}))
    assert len(MembersFile(path).read()) == MOST_MEMBERS
    path.write_bytes(b"a\n" + b" " * (1 << 20) + b"\nb\n")
    with pytest.raises(RunDirError):
        MembersFile(path).read()


class Disk:
    """A file with slow writes, which fail on request."""

    def __init__(self):
        self.written, self.errors, self.held = [], [], threading.Event()
        self.held.set()

    def write(self, names):
        """Write in a thread."""
        assert threading.current_thread() is not threading.main_thread()
        self.held.wait(10.0)
        if self.errors:
            raise self.errors.pop()
        self.written.append(names)


async def until(condition):
    """Wait for a condition, with a time limit."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("never")


def test_a_hanging_disk_blocks_nothing_and_gets_the_newest_names():
    """Of many changes during a minute without disk only the last one is written."""
    disk = Disk()
    disk.held.clear()

    async def play():
        keeper = MembersKeeper(disk, pytest.fail)
        for names in ("a", "ab", "abc", ""):
            keeper.keep(frozenset(names))
            await asyncio.sleep(0.01)
        assert disk.written == []
        disk.held.set()
        await keeper.close()

    asyncio.run(play())
    assert disk.written == [{"a"}, set()]


@pytest.mark.parametrize("newer", [None, frozenset(), frozenset("x")])
def test_a_failed_write_is_repeated_and_reported_once(newer):
    """Otherwise the names would be lost until the next change."""
    disk, errors = Disk(), []
    disk.errors = [OSError(28, "full"), OSError(28, "full")]

    async def play():
        keeper = MembersKeeper(disk, errors.append)
        keeper.AGAIN_S = 0.05
        keeper.keep(frozenset("ab"))
        await until(lambda: errors)
        if newer is not None:
            keeper.keep(newer)
        await until(lambda: disk.written)
        await keeper.close()

    asyncio.run(asyncio.wait_for(play(), 10.0))
    assert disk.written == [{"a", "b"} if newer is None else newer]
    assert len(errors) == 1
