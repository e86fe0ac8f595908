"""The file that tells the next parameter server who belonged to the run."""

import asyncio
import threading

import pytest

from fsl_async.cluster.members_file import FILE, MembersFile, MembersKeeper
from fsl_async.cluster.relaunches import MOST_MEMBERS
from fsl_async.errors import RunDirError
from fsl_async.files.text_checksum import with_checksum


def test_what_is_written_is_read(tmp_path):
    """Whole each time; without a file there is nobody."""
    file = MembersFile(tmp_path / FILE)
    assert file.read() == frozenset()
    for names in ({"b", "a-1.x_2"}, {"c"}, set()):
        file.write(names)
        assert MembersFile(file.path).read() == names
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"a b\n../x/y\n", b"n" * 65])
def test_what_is_no_name_is_passed_over(tmp_path, damage):
    """Names become words of commands."""
    (tmp_path / FILE).write_bytes(with_checksum(b"a\n" + damage + b"\nb\n"))
    assert MembersFile(tmp_path / FILE).read() == {"a", "b"}


def test_a_file_that_was_altered_is_refused(tmp_path):
    """One letter makes another client's name of it, and a program would be launched for that."""
    file = MembersFile(tmp_path / FILE)
    file.write({"site-a", "site-b"})
    whole = file.path.read_bytes()
    assert whole == b"site-a\nsite-b\n# crc dd3d5ec3\n"
    for bad in (whole.replace(b"-b", b"-c"), whole[7:], b"site-a\n", whole[:-2], whole + b"x\n"):
        file.path.write_bytes(bad)
        with pytest.raises(RunDirError, match=r"members\.txt does not match its checksum; remove"):
            file.read()
    file.path.write_bytes(b"")
    assert file.read() == frozenset()


def test_a_disk_that_takes_nothing_leaves_it_as_it_was(tmp_path):
    """Raised, so that people are told; what was known before is still there."""
    file = MembersFile(tmp_path / FILE)
    file.write({"a"})
    (tmp_path / f".{FILE}.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        file.write({"b"})
    assert file.read() == {"a"}


def test_a_file_of_any_size_is_read_within_bounds(tmp_path):
    """Somebody may have put anything in its place: a server that starts does not fill its memory
    with it.
    """
    path = tmp_path / FILE
    names = "".join(f"c{number}\n" for number in range(MOST_MEMBERS + 7))
    path.write_bytes(with_checksum(names.encode()))
    assert len(MembersFile(path).read()) == MOST_MEMBERS
    path.write_bytes(b"a\n" + b" " * (1 << 20) + b"\nb\n")
    with pytest.raises(RunDirError):
        MembersFile(path).read()


class Disk:
    """A file that takes its time, and fails when it is told to."""

    def __init__(self):
        self.written, self.errors, self.held = [], [], threading.Event()
        self.held.set()

    def write(self, names):
        """On a thread of its own."""
        assert threading.current_thread() is not threading.main_thread()
        self.held.wait(10.0)
        if self.errors:
            raise self.errors.pop()
        self.written.append(names)


async def until(condition):
    """Look often, but not for ever."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("never")


def test_a_disk_that_hangs_holds_nobody_and_gets_the_newest_then():
    """A change a second and a disk that is away for a minute: what was between need not be
    written.
    """
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


def test_what_changes_later_is_written_too():
    """Also after the disk had nothing to do for a while."""
    disk = Disk()

    async def play():
        keeper = MembersKeeper(disk, pytest.fail)
        for count, names in enumerate(("a", "ab"), 1):
            keeper.keep(frozenset(names))
            await until(lambda count=count: len(disk.written) == count)
            await asyncio.sleep(0.05)
        await keeper.close()

    asyncio.run(play())
    assert disk.written == [{"a"}, {"a", "b"}]


def test_what_came_while_a_write_failed_is_what_is_tried_next():
    """The older names are not."""
    disk, told = Disk(), []
    disk.errors = [OSError(28, "full")]
    disk.held.clear()

    async def play():
        keeper = MembersKeeper(disk, told.append)
        keeper.AGAIN_S = 0.05
        keeper.keep(frozenset("a"))
        await asyncio.sleep(0.05)
        keeper.keep(frozenset("ab"))
        disk.held.set()
        await until(lambda: disk.written)
        await keeper.close()

    asyncio.run(play())
    assert disk.written == [{"a", "b"}]


@pytest.mark.parametrize("newer", [None, frozenset(), frozenset("x")])
def test_what_could_not_be_written_is_tried_again_and_told_once(newer):
    """Otherwise it would be lost until somebody comes or goes."""
    disk, told = Disk(), []
    disk.errors = [OSError(28, "full"), OSError(28, "full")]

    async def play():
        keeper = MembersKeeper(disk, told.append)
        keeper.AGAIN_S = 0.05
        keeper.keep(frozenset("ab"))
        await until(lambda: told)
        if newer is not None:
            keeper.keep(newer)
        await until(lambda: disk.written)
        await keeper.close()

    asyncio.run(asyncio.wait_for(play(), 10.0))
    assert disk.written == [{"a", "b"} if newer is None else newer]
    assert len(told) == 1


def test_a_server_that_ends_tries_once_more_and_no_longer():
    """It waits for no disk that is full."""
    disk, told = Disk(), []
    disk.errors = [OSError(28, "full")] * 9

    async def play():
        keeper = MembersKeeper(disk, told.append)
        keeper.keep(frozenset("ab"))
        await until(lambda: told)
        await asyncio.wait_for(keeper.close(), 10.0)

    asyncio.run(play())
    assert len(disk.errors) == 7
    assert len(told) == 1
