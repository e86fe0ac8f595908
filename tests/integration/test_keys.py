"""Encrypted runs by real processes: which keys are admitted, messages at both ends, revocation."""

import shlex
import signal
import time

import pytest

from fsl_async.config import address as addresses
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder
from fsl_async.observe.journal import JournalReader
from fsl_transport.zmq.curve import KeyPair

pytestmark = pytest.mark.slow


class Keyed:
    """A parameter server with keys, and clients with theirs."""

    def __init__(self, site):
        self.site = site
        self.server_keys = KeysFolder(site.folder / "server-keys")
        self.public = self.server_keys.make_pair().public

    def serve(self, *more, **settings):
        """Start the parameter server; returns it. Clients dial its address with its key."""
        server = self.site.server("--keys", self.server_keys.path, *more, **settings)
        bare = addresses.parse(self.site.address)
        self.address = addresses.Address(bare.host, bare.port, self.public).fsl
        return server

    def client(self, name, *, trusted=True, address=None, keys=None):
        """Start a client with a key of its own."""
        folder = KeysFolder(self.site.folder / f"keys-{keys or name}")
        if not folder.has_pair():
            folder.make_pair()
        if trusted:
            self.trust(Entry(folder.pair().public, keys or name))
        task = f"{self.site.folder / 'task.py'}:train"
        words = ["--role", "client", "--name", name, "--task", task, "--keys", folder.path]
        return self.site.start(*words, address or self.address)

    def trust(self, entry):
        """Add an entry to the list's file, as `fsl-node keys trust` does."""
        self.server_keys.change_allowed(lambda before: before.with_entry(entry))

    def revoke(self, label):
        """Remove an entry from the list's file, as `fsl-node keys revoke` does."""
        self.server_keys.change_allowed(lambda before: before.without(before.labeled(label).key))


@pytest.fixture
def keyed(site):
    return Keyed(site)


def test_a_site_is_admitted_and_another_one_revoked_while_the_run_goes_on(keyed, site):
    """An unknown key is reported at both ends and admitted when it is trusted; a revoked key's
    session ends.
    """
    server = keyed.serve()
    a, b = keyed.client("a"), keyed.client("b", trusted=False)
    site.wait_version(1)
    public = KeysFolder(site.folder / "keys-b").pair().public
    # By its key: a may have dialed before the server read the list with a on it, and is then
    # reported too.
    line = server.wait_for(f"keys trust {shlex.quote(public)}")
    assert "a key that is not on the list came from 127.0.0.1" in line
    advice = b.wait_for("does not trust this client's key")
    typed = shlex.split(line.partition("keys trust ")[2])
    assert typed[0] == shlex.split(advice.partition("keys trust ")[2])[0] == public
    # As a user types it: the complete line, in the folder of the server.
    words = ["b" if word == "SITE" else word for word in typed]
    assert site.start("keys", "trust", *words).end() == 0
    server.wait_for("b joins")
    b.wait_for("joined run")

    keyed.revoke("a")
    server.wait_for("ended the sessions of a")
    assert a.end() == 2
    assert "the listener no longer accepts this key" in a.lines[-1]
    server.wait_for("a left: its key is no longer on the allow-list")
    newest = max(one["version"] for one in site.ledger("version"))
    site.wait_version(newest + 2)
    assert b.popen.poll() is None

    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert b.end() == 0


def test_the_printed_line_lets_a_client_join(keyed, site):
    """The line that a server prints joins its encrypted run; only the placeholders are filled in
    here.
    """
    server = keyed.serve("--set", f"train.task={str(site.folder / 'task.py') + ':train'!r}")
    line = server.wait_for("--role client --name")
    words = shlex.split(line)
    assert words[-1].startswith("fsl://")
    assert addresses.parse(words[-1]).key == keyed.public
    folder = KeysFolder(site.folder / "keys-a")
    keyed.trust(Entry(folder.make_pair().public, "a"))
    own = {"SITE": "a", "FILE.py:FUNCTION": f"{site.folder / 'task.py'}:train"}
    assert set(own) < set(words)
    client = site.start(
        *(own.get(word, word) for word in words[words.index("--role") :]), "--keys", folder.path
    )
    client.wait_for("joined run")
    server.wait_for("a joins")


HEARTBEAT_S = 2.0
SLACK_S = 0.5
"""Slack for the check itself on a busy machine."""


def test_a_revoked_key_ends_its_session_within_a_heartbeat(keyed, site):
    """As docs/SECURITY.md promises; measured by the server's clock. Expiry would take 30 s."""
    server = keyed.serve(
        session__heartbeat_every_s=HEARTBEAT_S, session__expire_after_s=30, sync__min_clients=1
    )
    client = keyed.client("a")
    server.wait_for("a joins")

    def left():
        lines = JournalReader(site.run_dir / "journal.jsonl").read_all()
        return [line for line in lines if line["type"] == "client_left" and line["peer"] == "a"]

    assert not left()
    revoked_at = time.time()
    keyed.revoke("a")
    site.wait_until(left, "the journal has that a left")
    (ended,) = left()
    assert ended["reason"] == "revoked"
    assert 0 <= ended["t"] - revoked_at <= HEARTBEAT_S + SLACK_S
    assert client.end() == 2


def test_a_name_is_its_keys_also_after_a_restart(keyed, site):
    """A trusted site cannot take another site's name."""
    server = keyed.serve()
    keyed.client("a")
    server.wait_for("a joins")
    thief = keyed.client("a", keys="thief")
    assert thief.end() == 2
    assert "the name a belongs to another key in this run" in thief.lines[-1]
    server.wait_for("a is refused: the name a belongs to another key")
    server.kill()
    again = keyed.serve()
    # Its key is trusted already. The list is not written again, so the wait below is for the next
    # change.
    thief = keyed.client("a", keys="thief", trusted=False)
    assert thief.end() == 2
    again.wait_for("1 client connected")
    public = KeysFolder(site.folder / "keys-thief").pair().public
    keyed.trust(Entry(public, "thief", names=("a",)))
    again.wait_for("read the list of keys again")
    assert keyed.client("a", keys="thief", trusted=False).wait_for("joined run")


def test_a_wrong_server_key_is_reported_at_both_ends(keyed, site):
    """An address with another server's key: without these lines both ends would be silent."""
    server = keyed.serve()
    bare = addresses.parse(site.address)
    wrong = addresses.Address(bare.host, bare.port, KeyPair.new().public).fsl
    client = keyed.client("a", address=wrong)
    client.wait_for("its key is not the one in this address")
    line = server.wait_for("expects another key of this node")
    assert addresses.parse(shlex.split(line.rpartition("give it ")[2])[0]).key == keyed.public
    plain = site.client("b")  # the same address without its key
    plain.wait_for("encrypts: give the complete address")
    server.wait_for("that does not encrypt: give it the complete address")


def replace_by(path, text):
    """Replace a file in one step: the server never reads an empty list."""
    new = path.with_name("new")
    new.touch(path.stat().st_mode & 0o777)
    new.write_text(text)
    new.replace(path)


def test_a_broken_list_changes_nothing_and_is_reported(keyed, site):
    """The file gets a wrong line while the run goes on."""
    server = keyed.serve()
    a = keyed.client("a")
    server.wait_for("a joins")
    path = keyed.server_keys.allowed_path
    good = path.read_text()
    replace_by(path, good + "oops\n")
    server.wait_for("the list of keys stays as it was, 1 key: ")
    replace_by(path, good)
    server.wait_for("read the list of keys again: 1 key")
    newest = max((one["version"] for one in site.ledger("version")), default=0)
    site.wait_version(newest + 1)
    assert a.popen.poll() is None
    assert (site.run_dir / "names.txt").read_text().startswith("a ")
