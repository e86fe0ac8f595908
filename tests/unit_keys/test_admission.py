"""Who comes in under which name, and what a file that changes or breaks does to that."""

import os

import pytest

from fsl_async.errors import KeysError
from fsl_async.files.text_checksum import chained
from fsl_async.keys import holders as holders_file
from fsl_async.keys.admission import Admission, Looked
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder
from fsl_async.keys.holders import NameHolders
from fsl_transport.zmq.curve import KeyPair

A, B, C = (KeyPair.new().public for _ in range(3))


@pytest.fixture
def folder(tmp_path):
    made = KeysFolder(tmp_path / "keys")
    put(made, Entry(A, "site-a"), Entry(B, "site-b"))
    return made


def put(folder, *entries):
    for entry in entries:
        folder.change_allowed(lambda before, one=entry: before.with_entry(one))


def door_of(folder, tmp_path):
    return Admission(folder, NameHolders(tmp_path / "names.txt"))


def listed(*bodies):
    """The lines of a names.txt."""
    made, checksum = b"", 0
    for body in bodies:
        line, checksum = chained(body.encode(), checksum)
        made += line
    return made


def test_a_name_is_the_first_ones_also_after_a_restart(folder, tmp_path):
    """A trusted site must not take the place of another one by its name and a later incarnation."""
    door = door_of(folder, tmp_path)
    assert door.admit("a", A) is None
    assert door.admit("a", A) is None
    code, text = door.admit("a", B)
    assert code == "name"
    assert "keys trust KEY --name site-b --names a" in text
    assert door.admit("b", B) is None
    again = door_of(folder, tmp_path)
    assert again.admit("a", B)[0] == "name"
    assert again.admit("a", A) is None
    assert (tmp_path / "names.txt").read_bytes() == listed(f"a {A}", f"b {B}")


def test_strangers_have_no_names(folder, tmp_path):
    """They may neither touch what is there under a name, nor have it written down."""
    door = door_of(folder, tmp_path)
    assert door.admit("a", KeyPair.new().public)[0] == "key"
    assert door.admit("a", "")[0] == "key"
    assert not door.allows("")
    assert not (tmp_path / "names.txt").exists()


def test_the_list_gives_and_hands_over_names(folder, tmp_path):
    """What a person has written counts more than who came first."""
    door = door_of(folder, tmp_path)
    assert door.admit("x", A) is None
    put(folder, Entry(B, "site-b", names=("x", "y")))
    assert door.look() == Looked(2)
    assert door.admit("x", A)[0] == "name"
    assert door.admit("y", A)[0] == "name"
    assert door.admit("x", B) is None
    assert "x, y" in door.admit("z", B)[1]
    put(folder, Entry(B, "site-b"))
    door.look()
    assert door.admit("x", B) is None  # handed over for good
    assert door.admit("x", A)[0] == "name"


def test_a_revoked_keys_name_is_not_free(folder, tmp_path):
    """Otherwise any other site could go on under the name of one that was thrown out."""
    door = door_of(folder, tmp_path)
    assert door.admit("a", A) is None
    folder.change_allowed(lambda before: before.without(A))
    assert door.look() == Looked(1)
    assert not door.allows(A)
    assert door.admit("a", A)[0] == "key"
    assert door.admit("a", B)[0] == "name"


def test_a_list_that_breaks_changes_nothing_and_is_told_once(folder, tmp_path):
    """A slip of an editor must not throw everybody out; one line for each change of the file."""
    door = door_of(folder, tmp_path)
    good = folder.allowed_path.read_text()
    assert door.look() is None
    for text, problem in ((good + "oops\n", "'oops' is no public key"), ("\xff", "no public key")):
        folder.allowed_path.write_text(text)
        looked = door.look()
        assert looked.keys == 2
        assert problem in looked.problem
        assert door.look() is None
    folder.allowed_path.unlink()
    assert "is gone" in door.look().problem
    assert door.look() is None
    assert door.allows(A)
    folder.allowed_path.write_text(good.replace(A, C))
    assert door.look() == Looked(2)
    assert (door.allows(A), door.allows(C)) == (False, True)
    folder.allowed_path.chmod(0o666)
    assert "chmod go-w" in door.look().problem


def test_a_list_of_the_same_size_and_time_is_seen(folder, tmp_path):
    """Keys have one length: a file made anew may differ in nothing but its number."""
    door = door_of(folder, tmp_path)
    found = folder.allowed_path.stat()
    folder.change_allowed(lambda before: before.without(A).with_entry(Entry(C, "site-a")))
    os.utime(folder.allowed_path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert folder.allowed_path.stat().st_size == found.st_size
    assert door.look() == Looked(2)
    assert door.allows(C)


def test_no_list_lets_nobody_in(tmp_path):
    """Whoever starts a server before trusting anybody has an empty room, not an open one."""
    door = door_of(KeysFolder(tmp_path / "nothing"), tmp_path)
    assert not door.allows(A)
    assert door.look() is None


def test_a_list_that_is_broken_at_the_start_is_an_error(folder, tmp_path):
    """There is nothing to fall back to."""
    folder.allowed_path.write_text("oops\n")
    with pytest.raises(KeysError, match=r"allowed\.txt line 1"):
        door_of(folder, tmp_path)


def test_a_torn_line_of_names_is_cut_off_and_a_damaged_one_is_named(tmp_path):
    """A crash tears the last line only; anything else is damage, and guessing would give names
    away.
    """
    path = tmp_path / "names.txt"
    path.write_bytes(listed(f"a {A}") + f"{'b' * 60} {B[:-1]}".encode())
    names = NameHolders(path)
    assert (names.get("a"), names.get("b" * 60)) == (A, "")
    names.hold("b", C)
    assert path.read_bytes() == listed(f"a {A}", f"b {C}")
    assert NameHolders(path).get("b") == C
    whole = listed(f"a {A}", f"b {C}", f"c {B}")
    lines = whole.splitlines(keepends=True)
    damaged = [
        whole.replace(b"\nb ", b"\nd "),  # another name has the key
        whole.replace(C.encode(), A.encode()),
        lines[0] + lines[2],  # a line is gone
        lines[1] + lines[0] + lines[2],
        f"a {A}\n".encode(),  # without a checksum
        *[listed(bad) for bad in (f"\na {A}", f"a/b {A}", f"a {A} x", "\xff")],
    ]
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(KeysError, match=r"names.txt line \d: damaged"):
            NameHolders(path)


def test_a_name_that_cannot_be_written_down_is_not_given(folder, tmp_path, monkeypatch):
    """On a full disk: refused now, free later, and no half line in front of the next one."""
    door = door_of(folder, tmp_path)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(holders_file.os, "fsync", full)
        code, text = door.admit("a", A)
    assert code == "name"
    assert "No space left on device" in text
    assert door.admit("b", B) is None
    assert (tmp_path / "names.txt").read_bytes() == listed(f"b {B}")


def test_names_are_bounded(folder, tmp_path, monkeypatch):
    """A trusted key may still be a hostile one: it can fill neither memory nor disk with names."""
    monkeypatch.setattr(holders_file, "MOST_NAMES", 3)
    door = door_of(folder, tmp_path)
    assert [door.admit(f"n{n}", A) is None for n in range(5)] == [True, True, True, False, False]
    assert door.admit("n0", A) is None


def test_another_server_with_the_same_pair_comes_under_its_name(folder, tmp_path):
    """One folder of keys for both servers of a machine; whoever holds the pair could be this
    server, but trains nothing with it.
    """
    holders = NameHolders(tmp_path / "names.txt")
    own = KeyPair.new().public
    door = Admission(folder, holders, {"parameter-server": own})
    assert door.allows(own)
    assert door.admit("parameter-server", own) is None
    assert door.admit("a", own)[0] == "key"
    assert door.admit("parameter-server", KeyPair.new().public)[0] == "key"
    plain = Admission(folder, holders, {"": own})
    assert not plain.allows(own)
    assert not plain.allows("")
    assert plain.admit("", own)[0] == "key"


def test_a_clients_key_does_not_get_another_servers_name(folder, tmp_path):
    """It could end the run there, and keep the parameter server out by having the name first; a
    person may give the name to a key.
    """
    holders = NameHolders(tmp_path / "names.txt")
    own = KeyPair.new().public
    door = Admission(folder, holders, {"parameter-server": own})
    code, text = door.admit("parameter-server", A)
    assert code == "name"
    assert "keys trust KEY --name site-a --names parameter-server" in text
    assert not (tmp_path / "names.txt").exists()
    assert door.admit("parameter-server", own) is None
    put(folder, Entry(C, "ps", ("parameter-server",)))
    assert door.look() == Looked(3)
    assert door.admit("parameter-server", C) is None
    assert door.admit("parameter-server", A)[0] == "name"
    assert door.admit("a", C)[0] == "name", "it is no client"
    assert door.admit("parameter-server", own) is None
    assert door_of(folder, tmp_path).admit("site", A) is None, "of a server without a sister"


def test_a_name_that_the_disk_took_in_part_is_not_held(tmp_path, monkeypatch):
    """A disk that becomes full takes half a line without an error: that client was let in, and at
    the next start the file was damaged.
    """
    holders, write = NameHolders(tmp_path / "names.txt"), os.pwrite
    holders.hold("a", A)
    room = [10]

    def full(descriptor, data, offset):
        taken, room[0] = data[: room[0]], max(0, room[0] - len(data))
        if not taken:
            raise OSError(28, "No space left on device")
        return write(descriptor, taken, offset)

    monkeypatch.setattr(holders_file.os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        holders.hold("b", B)
    assert holders.get("b") == ""
    monkeypatch.setattr(holders_file.os, "pwrite", write)
    holders.hold("c", C)
    again = NameHolders(tmp_path / "names.txt")
    assert [again.get(name) for name in "abc"] == [A, "", C]


@pytest.mark.parametrize("damage", ["zeros", "newline"])
def test_names_that_a_damaged_end_would_give_away_are_refused(tmp_path, damage):
    """Who says HELLO next would own another site's name."""
    path = tmp_path / "names.txt"
    NameHolders(path).hold("a", A)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)) if damage == "zeros" else whole[:-1] + b"X")
    with pytest.raises(KeysError, match="damaged at its end"):
        NameHolders(path)
