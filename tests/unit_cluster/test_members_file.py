"""The file that tells the next parameter server who belonged to the run."""

import pytest

from fsl_async.cluster.members_file import FILE, MembersFile


def test_what_is_written_is_read(tmp_path):
    """Whole each time; without a file there is nobody."""
    file = MembersFile(tmp_path / FILE)
    assert file.read() == frozenset()
    for names in ({"b", "a-1.x_2"}, {"c"}, set()):
        file.write(names)
        assert MembersFile(file.path).read() == names
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("damage", [b"\x00\x00\x00", b"\xff\xfe", b"a b\n../x/y\n", b"n" * 65])
def test_what_is_no_name_is_passed_over(tmp_path, damage):
    """A power cut may leave anything, and names become words of commands."""
    (tmp_path / FILE).write_bytes(b"a\n" + damage + b"\nb\n")
    assert MembersFile(tmp_path / FILE).read() == {"a", "b"}


def test_a_disk_that_takes_nothing_leaves_it_as_it_was(tmp_path):
    """Raised, so that people are told; what was known before is still there."""
    file = MembersFile(tmp_path / FILE)
    file.write({"a"})
    (tmp_path / f".{FILE}.part").mkdir()
    with pytest.raises(OSError, match="directory"):
        file.write({"b"})
    assert file.read() == {"a"}
