"""Encrypted runs by real processes: which keys are admitted, messages at both ends, revocation."""

import shlex
import signal
import time

import pytest

from fsl_async.config import address as addresses
from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder

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
    revoked_at = time.monotonic()
    server.wait_for("ended the sessions of a")
    # As docs/SECURITY.md promises: within a heartbeat, and some slack. Expiry would take 5 s.
    assert time.monotonic() - revoked_at < 3.0
    assert a.end() == 2
    assert "the listener no longer accepts this key" in a.lines[-1]
    server.wait_for("a left: its key is no longer on the allow-list")
    newest = max(one["version"] for one in site.ledger("version"))
    site.wait_version(newest + 2)
    assert b.popen.poll() is None

    server.signal(signal.SIGINT)
    assert server.end() == 130
    assert b.end() == 0


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
