"""Which keys are admitted under which names, and the effect of a list that changes or breaks."""

import os

import pytest

from fsl_async.errors import KeysError
from fsl_async.keys import access_control as holders_file
from fsl_async.keys.access_control import Admission, NameHolders, Reread, chained
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder
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


def admission_of(folder, tmp_path):
    return Admission(folder, NameHolders(tmp_path / "names.txt"))


def listed(*bodies):
    """Return the lines of a names.txt."""
    made, checksum = b"", 0
    for body in bodies:
        line, checksum = chained(body.encode(), checksum)
        made += line
    return made


def test_a_name_is_the_first_ones_also_after_a_restart(folder, tmp_path):
    """A trusted site must not replace another one by its name and a later incarnation."""
    admission = admission_of(folder, tmp_path)
    assert admission.admit("a", A) is None
    assert admission.admit("a", A) is None
    code, text = admission.admit("a", B)
    assert code == "name"
    assert "keys trust KEY --name site-b --names a" in text
    assert admission.admit("b", B) is None
    again = admission_of(folder, tmp_path)
    assert again.admit("a", B)[0] == "name"
    assert again.admit("a", A) is None
    assert (tmp_path / "names.txt").read_bytes() == listed(f"a {A}", f"b {B}")


def test_unauthenticated_peers_have_no_names(folder, tmp_path):
    """They must not affect clients of that name, nor reserve it."""
    admission = admission_of(folder, tmp_path)
    assert admission.admit("a", KeyPair.new().public)[0] == "key"
    assert admission.admit("a", "")[0] == "key"
    assert not admission.allows("")
    assert not (tmp_path / "names.txt").exists()


def test_the_list_assigns_names(folder, tmp_path):
    """The list counts more than the first use."""
    admission = admission_of(folder, tmp_path)
    assert admission.admit("x", A) is None
    put(folder, Entry(B, "site-b", names=("x", "y")))
    assert admission.reread() == Reread(2)
    assert admission.admit("x", A)[0] == "name"
    assert admission.admit("y", A)[0] == "name"
    assert admission.admit("x", B) is None
    assert "x, y" in admission.admit("z", B)[1]
    put(folder, Entry(B, "site-b"))
    admission.reread()
    assert admission.admit("x", B) is None  # handed over for good
    assert admission.admit("x", A)[0] == "name"


def test_a_revoked_keys_name_is_not_free(folder, tmp_path):
    """Otherwise another site could continue under the name of a revoked one."""
    admission = admission_of(folder, tmp_path)
    assert admission.admit("a", A) is None
    folder.change_allowed(lambda before: before.without(A))
    assert admission.reread() == Reread(1)
    assert not admission.allows(A)
    assert admission.admit("a", A)[0] == "key"
    assert admission.admit("a", B)[0] == "name"


def test_a_list_that_breaks_changes_nothing_and_is_reported_once(folder, tmp_path):
    """An error while editing must not remove clients; there is one line for each change of the
    file.
    """
    admission = admission_of(folder, tmp_path)
    good = folder.allowed_path.read_text()
    assert admission.reread() is None
    for text, problem in ((good + "oops\n", "'oops' is no public key"), ("\xff", "no public key")):
        folder.allowed_path.write_text(text)
        looked = admission.reread()
        assert looked.keys == 2
        assert problem in looked.problem
        assert admission.reread() is None
    folder.allowed_path.unlink()
    assert "is gone" in admission.reread().problem
    assert admission.reread() is None
    assert admission.allows(A)
    folder.allowed_path.write_text(good.replace(A, C))
    assert admission.reread() == Reread(2)
    assert (admission.allows(A), admission.allows(C)) == (False, True)
    folder.allowed_path.chmod(0o666)
    assert "chmod go-w" in admission.reread().problem


def test_a_list_of_the_same_size_and_time_is_read(folder, tmp_path):
    """Keys have equal lengths: a replaced file may differ only in its inode."""
    admission = admission_of(folder, tmp_path)
    found = folder.allowed_path.stat()
    folder.change_allowed(lambda before: before.without(A).with_entry(Entry(C, "site-a")))
    os.utime(folder.allowed_path, ns=(found.st_atime_ns, found.st_mtime_ns))
    assert folder.allowed_path.stat().st_size == found.st_size
    assert admission.reread() == Reread(2)
    assert admission.allows(C)


def test_without_a_list_no_key_is_admitted(tmp_path):
    """A parameter server without trusted keys must be closed, not open."""
    admission = admission_of(KeysFolder(tmp_path / "nothing"), tmp_path)
    assert not admission.allows(A)
    assert admission.reread() is None


def test_a_list_that_is_broken_at_the_start_is_an_error(folder, tmp_path):
    """There is no earlier list to use."""
    folder.allowed_path.write_text("oops\n")
    with pytest.raises(KeysError, match=r"allowed\.txt line 1"):
        admission_of(folder, tmp_path)


def test_a_torn_line_of_names_is_cut_off_and_a_damaged_one_is_named(tmp_path):
    """A crash tears only the last line; other damage must not free a name."""
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


def test_a_name_that_cannot_be_stored_is_not_assigned(folder, tmp_path, monkeypatch):
    """On a full disk it is refused now, free later, and leaves no part of a line."""
    admission = admission_of(folder, tmp_path)

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        code, text = admission.admit("a", A)
    assert code == "name"
    assert "No space left on device" in text
    assert admission.admit("b", B) is None
    assert (tmp_path / "names.txt").read_bytes() == listed(f"b {B}")


def test_names_are_bounded(folder, tmp_path, monkeypatch):
    """A trusted key must not be able to fill memory or disk with names."""
    monkeypatch.setattr(holders_file, "MOST_NAMES", 3)
    admission = admission_of(folder, tmp_path)
    assert [admission.admit(f"n{n}", A) is None for n in range(5)] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert admission.admit("n0", A) is None


def test_another_node_with_the_same_pair_joins_under_its_name(folder, tmp_path):
    """Both servers of a machine may share a keys folder; their key must not join as a client."""
    holders = NameHolders(tmp_path / "names.txt")
    own = KeyPair.new().public
    admission = Admission(folder, holders, {"parameter-server": own})
    assert admission.allows(own)
    assert admission.admit("parameter-server", own) is None
    assert admission.admit("a", own)[0] == "key"
    assert admission.admit("parameter-server", KeyPair.new().public)[0] == "key"
    plain = Admission(folder, holders, {"": own})
    assert not plain.allows(own)
    assert not plain.allows("")
    assert plain.admit("", own)[0] == "key"


def test_a_clients_key_does_not_get_the_parameter_servers_name(folder, tmp_path):
    """It could end the run there, or keep the parameter server out; the list may assign it."""
    holders = NameHolders(tmp_path / "names.txt")
    own = KeyPair.new().public
    admission = Admission(folder, holders, {"parameter-server": own})
    code, text = admission.admit("parameter-server", A)
    assert code == "name"
    assert "keys trust KEY --name site-a --names parameter-server" in text
    assert not (tmp_path / "names.txt").exists()
    assert admission.admit("parameter-server", own) is None
    put(folder, Entry(C, "ps", ("parameter-server",)))
    assert admission.reread() == Reread(3)
    assert admission.admit("parameter-server", C) is None
    assert admission.admit("parameter-server", A)[0] == "name"
    assert admission.admit("a", C)[0] == "name", "it is no client"
    assert admission.admit("parameter-server", own) is None
    assert admission_of(folder, tmp_path).admit("site", A) is None, "nothing is reserved"


def test_a_name_that_was_written_in_part_is_not_held(tmp_path, monkeypatch):
    """A disk that becomes full takes a part of a line without an error."""
    holders, write = NameHolders(tmp_path / "names.txt"), os.pwrite
    holders.hold("a", A)
    room = [10]

    def full(descriptor, data, offset):
        taken, room[0] = data[: room[0]], max(0, room[0] - len(data))
        if not taken:
            raise OSError(28, "No space left on device")
        return write(descriptor, taken, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        holders.hold("b", B)
    assert holders.get("b") == ""
    monkeypatch.setattr(os, "pwrite", write)
    holders.hold("c", C)
    again = NameHolders(tmp_path / "names.txt")
    assert [again.get(name) for name in "abc"] == [A, "", C]


@pytest.mark.parametrize("damage", ["zeros", "newline"])
def test_a_damaged_end_of_the_names_is_refused(tmp_path, damage):
    """Otherwise the next HELLO could get another site's name."""
    path = tmp_path / "names.txt"
    NameHolders(path).hold("a", A)
    whole = path.read_bytes()
    path.write_bytes(bytes(len(whole)) if damage == "zeros" else whole[:-1] + b"X")
    with pytest.raises(KeysError, match="damaged at its end"):
        NameHolders(path)
