"""Messages about handshakes: correct, limited in number, and ready to paste."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

import fsl_transport as tp
from fsl_async.config.address import Address, parse
from fsl_async.errors import AddressError, KeysError
from fsl_async.keys.access_control import AccessControl, at_server
from fsl_async.keys.dialling import (
    EXPLAINED_S,
    LONGEST_S,
    HandshakeReports,
    LessOften,
    at_client,
    split_curve,
)
from fsl_async.keys.folder import KeysFolder
from fsl_async.observe.journal import TraceHash
from fsl_async.roles.phrasing import AGAIN_S, BURST, MessageThrottle
from fsl_transport.zmq.curve import UNKNOWN_KEY, HandshakeFailed, KeyPair

INVITE = Address("h", 1, "a" * 40).fsl


def test_the_same_message_is_limited():
    """A refused client dials again every two seconds, with two connections."""
    throttle = MessageThrottle()
    assert [throttle.lets("x", now) for now in (0.0, 1.0, AGAIN_S - 1, AGAIN_S)] == [
        "", None, None, " (and 2 more were not printed)",
    ]  # fmt: skip


def test_each_thing_of_admitted_clients_has_its_own_count():
    """A flood of one client hides no other."""
    throttle = MessageThrottle(by_thing=True)
    assert [throttle.lets(f"{number}", 0.0) for number in range(2 * BURST)] == [""] * 2 * BURST
    assert {throttle.lets("0", number / 10) for number in range(352)} == {None}
    assert throttle.lets("1", AGAIN_S) == ""
    assert throttle.lets("0", AGAIN_S) == " (and 352 more were not printed)"


def test_a_flood_of_new_messages_is_counted_and_not_printed():
    """An attacker can use a new key for each connection: log and memory must not grow."""
    throttle = MessageThrottle()
    printed = [throttle.lets(str(number), number / 1000) for number in range(10_000)]
    assert printed == [""] * BURST + [None] * (10_000 - BURST)
    assert (len(throttle._sent), len(throttle._held_back)) == (BURST, 1)
    rest = f" (and {10_000 - BURST:,} more were not printed)"
    assert [throttle.lets(name, 11 + AGAIN_S) for name in ("later", "more")] == [rest, ""]


def test_the_line_that_trusts_a_key_survives_a_shell():
    """Z85 has characters that are special to a shell, and the line is pasted."""
    key = KeyPair.new().public[:20] + "$&*()<>?[]{}!^%=/+:-"
    failed = HandshakeFailed("unknown-key", key, "192.0.2.1")
    for line in (
        at_server(failed, INVITE, KeysFolder(Path("/k"))),
        at_client(failed, parse("h:1"), key, "site-a"),
    ):
        words = shlex.split(line.partition("keys trust ")[2])
        assert words[:2] == [key, "--name"]
        assert shlex.quote(key) in line
    reserved = at_client(failed, parse("h:1"), key, "parameter-server", is_reserved=True)
    assert reserved.endswith(" --name parameter-server --names parameter-server")
    assert "192.0.2.1" in at_server(failed, INVITE, KeysFolder())
    assert at_server(failed, INVITE, KeysFolder(Path("/k"))).endswith("--keys /k")


@pytest.mark.parametrize("invite", [INVITE, "tcp://h:1"])
@pytest.mark.parametrize("why", ["server-key", "mechanism"])
def test_the_listeners_message_has_the_address_for_the_client(why, invite):
    """The complete address, quoted, if the node encrypts; else the address without key."""
    line = at_server(HandshakeFailed(why), invite, KeysFolder())
    assert (shlex.quote(invite) if "key" in invite or why == "server-key" else invite) in line


@pytest.mark.parametrize(
    ("why", "public", "words"),
    [
        ("closed", "k", "closed the connection during the handshake"),
        ("mechanism", "k", "does not encrypt"),
        ("mechanism", "", "h:1 encrypts: give the complete address"),
        ("closed", "", ""),  # nothing listens behind a tunnel: which is reported as no answer
        ("other", "k", ""),
    ],
)
def test_the_clients_message_names_the_possible_causes(why, public, words):
    """Several causes look alike at the client."""
    line = at_client(HandshakeFailed(why), parse("h:1"), public, "a")
    assert words in line
    assert bool(line) == bool(words)


def test_a_split_server_is_not_reached_less_safely_than_the_parameter_server(tmp_path):
    """Otherwise the parameter server could make clients send activations and labels unencrypted."""
    folder = KeysFolder(tmp_path)
    assert split_curve(Address("h", 1), folder, encrypted=False) is None
    assert split_curve(Address("127.0.0.1", 1), folder, encrypted=True) is None
    with pytest.raises(AddressError, match="names a split server without a key"):
        split_curve(Address("h", 1), folder, encrypted=True)
    there = Address("h", 1, KeyPair.new().public)
    with pytest.raises(KeysError, match="keys new"):
        split_curve(there, folder, encrypted=False)
    pair = folder.make_pair()
    assert split_curve(there, folder, encrypted=False).pair == pair


def test_a_refused_client_repeats_itself_less_and_less_often():
    """Each minute of a night that its operator sleeps is a line of no news."""
    often = LessOften()
    at = [now for now in range(0, 36_000, 2) if often.lets("unknown-key", float(now))]
    assert at[:5] == [0, 60, 180, 420, 900]
    assert at[-1] - at[-2] == LONGEST_S
    assert often.lets("mechanism", 36_000.0)


class Clock:
    """A scheduler with its time only."""

    now = 100.0

    def time(self):
        """See Scheduler."""
        return self.now


def test_a_refused_key_is_no_server_that_is_away():
    """It was told every 10 s to look whether the server is running."""
    clock, lines, events = Clock(), [], []
    reports = HandshakeReports(
        parse(INVITE), "k", "a", scheduler=clock, note=TraceHash().note, log=lines.append
    )
    take = reports.beside(events.append)
    away, up = tp.Unreachable("tcp://h:1", 10.0), tp.PeerUp("server", 1, {})
    take(away)
    assert events == [away]  # it is away, as far as is known
    for _ in range(30):
        reports(HandshakeFailed("unknown-key", "", ""))
        clock.now += 2.0
        take(away)
    assert events == [away]
    assert len(lines) == 1
    assert "not on the allow-list" in lines[0]
    assert "keys trust k --name a" in lines[0]
    reports(HandshakeFailed("unknown-key", "", ""))
    assert len(lines) == 2
    clock.now += EXPLAINED_S + 1
    take(away)  # now nothing listens there any more
    take(up)
    assert events == [away, away, up]
    reports(HandshakeFailed("unknown-key", "", ""))  # revoked: this is news
    assert len(lines) == 3


def test_the_command_that_trusts_a_key_is_the_end_of_its_line(tmp_path):
    """People copy the rest of the line: a count of lines that were not printed stands before it."""
    folder = KeysFolder(tmp_path)
    folder.make_pair()
    control, said, now = AccessControl(folder, tmp_path), [], [0.0]
    loop = SimpleNamespace(time=lambda: now[0], call_later=lambda *_: None)
    endpoint = SimpleNamespace(address="tcp://127.0.0.1:7000")
    control.open(loop, endpoint, lambda *_, **__: 0, said.append, heartbeat_s=10.0)
    keys = [KeyPair.new().public for _ in range(BURST + 1)]
    for key in keys:
        control.handshake_failed(HandshakeFailed(UNKNOWN_KEY, key, "10.0.0.1"))
    now[0] = AGAIN_S
    control.handshake_failed(HandshakeFailed(UNKNOWN_KEY, keys[0], "10.0.0.1"))
    line = said[-1].text
    assert "came from 10.0.0.1 (and 1 more were not printed); to trust it: " in line
    typed = shlex.split(line.partition("keys trust ")[2])
    assert typed == [keys[0], "--name", "SITE", "--keys", str(tmp_path)]
