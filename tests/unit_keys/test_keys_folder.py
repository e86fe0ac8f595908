"""The keys folder: modes, atomic writes, and errors with commands."""

import os
import stat

import pytest

from fsl_async.errors import KeysError
from fsl_async.keys import folder as folders
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder, default_directory
from fsl_transport.zmq.curve import KeyPair

A = KeyPair.new().public


@pytest.fixture
def folder(tmp_path):
    return KeysFolder(tmp_path / "config" / "keys")


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_modes_whatever_the_umask(folder):
    """A world-readable secret (as of `zmq.auth.create_certificates`) is the usual way to lose a
    key.
    """
    before = os.umask(0)
    try:
        pair = folder.make_pair()
        folder.change_allowed(lambda found: found.with_entry(Entry(A, "a")))
    finally:
        os.umask(before)
    assert mode(folder.path) == 0o700
    assert mode(folder.secret_path) == 0o600
    assert mode(folder.allowed_path) == 0o600
    assert sorted(path.name for path in folder.path.iterdir()) == ["allowed.txt", "node.key"]
    assert folder.pair() == pair
    assert pair.public[0].isalnum()


def test_the_secret_is_never_open_to_others_even_for_a_moment(folder, monkeypatch):
    """Between creation and a later chmod another process could open it."""
    created = []
    real = os.open

    def spy(path, flags, *mode, **more):
        descriptor = real(path, flags, *mode, **more)
        if flags & os.O_CREAT:
            created.append((flags, stat.S_IMODE(os.fstat(descriptor).st_mode)))
        return descriptor

    monkeypatch.setattr(folders.os, "open", spy)
    folder.make_pair()
    assert created
    assert all(flags & os.O_EXCL and found == 0o600 for flags, found in created)


def test_a_pair_is_made_once(folder):
    """A second pair would be trusted by no node."""
    pair = folder.make_pair()
    with pytest.raises(KeysError, match="exists already"):
        folder.make_pair()
    assert folder.pair() == pair
    assert [path.name for path in folder.path.iterdir()] == ["node.key"]


def test_without_a_pair_the_error_has_the_command(folder):
    """It is the first error that a new user gets."""
    assert not folder.has_pair()
    with pytest.raises(KeysError, match=rf"run .*keys new --keys {folder.path}"):
        folder.pair()
    assert folder.allowed() is None


@pytest.mark.parametrize("bits", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_secret_that_others_may_touch_is_refused(folder, bits):
    """As by ssh, and with the command that repairs it."""
    folder.make_pair()
    folder.secret_path.chmod(bits)
    with pytest.raises(KeysError, match=f"run chmod 600 {folder.secret_path}"):
        folder.pair()


@pytest.mark.parametrize("bits", [0o620, 0o602])
def test_a_list_that_others_may_change_is_refused(folder, bits):
    """A user who can write the list can admit any key."""
    folder.change_allowed(lambda found: found.with_entry(Entry(A, "a")))
    folder.allowed_path.chmod(0o644)
    assert folder.allowed().entries.get(A) is not None
    folder.allowed_path.chmod(bits)
    with pytest.raises(KeysError, match=f"run chmod go-w {folder.allowed_path}"):
        folder.allowed()


def test_a_folder_that_others_may_change_is_refused(folder):
    """Other users could replace its files."""
    folder.make_pair()
    folder.path.chmod(0o770)
    with pytest.raises(KeysError, match=f"run chmod 700 {folder.path}"):
        folder.pair()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text.replace("secret ", "secret x"),
        lambda text: text.replace("public ", "public x"),
        lambda text: "".join(text.splitlines(keepends=True)[:2]),
        lambda text: text + "more\n",
        lambda text: text.replace("secret", "private"),
        lambda text: text.replace(text.split()[-1], "0" * 40),
        lambda text: text.replace(text.split()[-1], KeyPair.new().secret),
    ],
)
def test_a_damaged_pair_is_named(folder, change):
    """A part of a pair must not become another one."""
    folder.make_pair()
    folder.secret_path.write_text(change(folder.secret_path.read_text()))
    with pytest.raises(KeysError, match="damaged; restore it, or remove it and run"):
        folder.pair()


def test_what_is_no_text_and_no_file(folder):
    """Bytes, too many bytes, a folder, a pipe that would block for ever."""
    folder.make_pair()
    folder.allowed_path.write_bytes(b"\xff\xfe")
    with pytest.raises(KeysError, match="not text"):
        folder.allowed()
    folder.secret_path.write_bytes(b"#" * 5000)
    with pytest.raises(KeysError, match="longer than"):
        folder.pair()
    folder.allowed_path.unlink()
    os.mkfifo(folder.allowed_path)
    with pytest.raises(KeysError, match="is no file"):
        folder.allowed()


def test_a_change_that_fails_leaves_the_list_as_it_was(folder, monkeypatch):
    """A full disk during a revocation must neither admit nor remove other keys."""
    folder.change_allowed(lambda found: found.with_entry(Entry(A, "a")))
    before = folder.allowed_path.read_text()

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "fsync", full)
    with pytest.raises(KeysError, match="cannot write in"):
        folder.change_allowed(lambda found: found.without(A))
    assert folder.allowed_path.read_text() == before
    assert [path.name for path in folder.path.iterdir()] == ["allowed.txt"]


def test_where_keys_are(monkeypatch, tmp_path):
    """FSL_KEYS, then XDG's folder, then the home's; by its specification a relative XDG path is
    ignored.
    """
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.delenv("FSL_KEYS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    assert str(default_directory()) == "/home/x/.config/fsl-async"
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/x")
    assert str(default_directory()) == "/etc/x/fsl-async"
    monkeypatch.setenv("FSL_KEYS", "~/k")
    assert str(default_directory()) == "/home/x/k"
    assert KeysFolder().path == default_directory()
    assert KeysFolder().command("new").endswith("keys new")


def test_a_site_with_another_key_is_refused_and_new_ones_are_noted(folder):
    """The parameter server tells the keys, and may replace one later."""
    b, c = KeyPair.new().public, KeyPair.new().public
    assert folder.know_sites({"b": b}) == ["b"]
    assert folder.know_sites({"b": b, "c": c}) == ["c"]
    assert mode(folder.path / "sites.txt") == 0o600
    before = (folder.path / "sites.txt").read_text()
    with pytest.raises(KeysError, match=r"^c has another key than in .*sites.txt: ask its"):
        folder.know_sites({"d": A, "c": A})
    assert (folder.path / "sites.txt").read_text() == before
    assert f"{c}  c" in before
