"""The disk in memory: as the real one while there is power, and no better afterwards."""

import random
from pathlib import Path

import pytest

from fsl_async.files.files import Files
from fsl_async.files.memory_files import MemoryDisk, MemoryFiles


def tree(files, folder):
    """Return what is under a folder: path -> content, or None for a folder."""
    found = {}
    for name in files.names(folder):
        path = folder / name
        if files.is_directory(path):
            found[name] = tree(files, path)
        else:
            found[name] = files.read_whole(path, 1 << 20)
    return found


def play(files, root, seed):
    """Make 300 random calls; return what each gave, errors by their numbers."""
    chance = random.Random(seed)
    paths = [root / name for name in ("a", "b", "d", "d/c", "d/e", "d/a")]
    opened, given = [], []
    for _ in range(300):
        path, other = chance.choice(paths), chance.choice(paths)
        number, data = chance.randrange(40), chance.randbytes(chance.randrange(30))
        at = chance.randrange(len(opened)) if opened else -1
        calls = {
            "folder": lambda: files.make_directory(path),  # noqa: B023 - called at once
            "create": lambda: opened.append(files.create(path)),  # noqa: B023
            "open": lambda: opened.append(files.open_existing(path, writable=True)),  # noqa: B023
            "write": lambda: at < 0 or files.write(opened[at], data, number),  # noqa: B023
            "cut": lambda: at < 0 or files.truncate(opened[at], number),  # noqa: B023
            "read": lambda: at < 0 or files.read(opened[at], number, number // 2),  # noqa: B023
            "rename": lambda: files.rename(path, other),  # noqa: B023
            "remove": lambda: files.remove(path),  # noqa: B023
            "remove_any": lambda: files.remove_any(path),  # noqa: B023
            "is_at": lambda: at < 0 or files.is_at(opened[at], path),  # noqa: B023
            "lock": lambda: at < 0 or files.lock(opened[at]),  # noqa: B023
            "names": lambda: files.names(root),
            "close": lambda: files.close(opened.pop(at)) if opened else None,  # noqa: B023
        }
        name = chance.choice(sorted(calls))
        try:
            given.append((name, calls[name]()))
        except OSError:
            given.append((name, "refused"))
    for descriptor in opened:
        files.close(descriptor)
    return given, tree(files, root)


@pytest.mark.parametrize("seed", range(12))
def test_calls_do_what_the_real_disk_does(seed, tmp_path):
    """A simulated store must meet the same disk as a real one."""
    memory = MemoryFiles(MemoryDisk())
    for one in [*reversed(tmp_path.parents), tmp_path]:
        memory.make_directory(one)
    assert play(memory, tmp_path, seed) == play(Files(), tmp_path, seed)


def test_it_moves_between_disks(tmp_path):
    """A run that was simulated is a directory like any other."""
    (tmp_path / "from/inside").mkdir(parents=True)
    (tmp_path / "from/inside/file").write_bytes(b"content")
    (tmp_path / "to").mkdir()
    disk = MemoryDisk()
    disk.read_from(tmp_path / "from", Path("/any/run"))
    disk.write_to(tmp_path / "to", Path("/any/run"))
    assert tree(Files(), tmp_path / "to") == {"inside": {"file": b"content"}}
