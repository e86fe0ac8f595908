"""A relay's process: its journal, and its end."""

import asyncio
import json
import socket
import threading

import pytest

from fsl_async.errors import AddressError, RunDirError
from fsl_async.nodes.relay import pair, relay
from fsl_async.nodes.relay.relay import Route, serve
from fsl_async.process.stopper import Stopper

GREETING = b"\xff" + bytes(8) + b"\x7f\3\1" + b"NULL".ljust(20, b"\0") + bytes(32)


def run(server, stop, announce, run_dir=None):
    """Serve one route to `server` until the end."""
    route = Route("127.0.0.1:0", server, requires_curve=False)
    return serve([route], run_dir=run_dir, announce=announce, tell=lambda _: None, stop=stop)


def in_a_thread(work):
    """Run `work` in a thread beside the relay."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_the_summary_and_the_journal_count_bytes(tmp_path):
    """Connections that are open at the end count too."""
    stop = Stopper()

    def talk(bound):
        def work():
            with socket.create_connection(bound[0]) as near:
                near.sendall(GREETING + b"hello")
                far, _ = listener.accept()
                with far:
                    got = b""
                    while len(got) < 69:
                        got += far.recv(69)
                    stop.request(reason="Ctrl-C")
                    near.recv(1)

        in_a_thread(work)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        summary = run(place, stop, talk, tmp_path / "r")
    assert (summary.connections, summary.bytes_up, summary.bytes_down) == (1, 69, 0)
    assert (summary.reason, summary.dropped) == ("Ctrl-C", {})
    lines = (tmp_path / "r" / "journal.jsonl").read_text().splitlines()
    started, accepted, asked, ended = map(json.loads, lines)
    assert started["type"] == "node_started"
    assert started["routes"] == [f"127.0.0.1:0 -> {place}"]
    assert (accepted["type"], accepted["server"]) == ("connection_accepted", place)
    assert accepted["address"] == "127.0.0.1"
    assert (asked["type"], asked["reason"]) == ("drain_asked", "Ctrl-C")
    assert (ended["type"], ended["up"], ended["down"]) == ("node_ended", 69, 0)


def test_asked_twice_it_ends_at_once(monkeypatch):
    """It ends even with bytes under way."""
    monkeypatch.setattr(relay.Relay, "drain", lambda _: asyncio.sleep(1000))
    stop = Stopper()

    def ask(_):
        stop.request(reason="Ctrl-C")
        stop.request(hard=True)

    assert run("127.0.0.1:1", stop, ask).reason == "Ctrl-C"


def test_a_bug_ends_it(monkeypatch):
    """It ends with the exception instead of serving in part."""

    def connect(bound):
        def work():
            with socket.create_connection(bound[0]) as near:
                near.recv(1)

        in_a_thread(work)

    monkeypatch.setattr(pair.Pair, "_open", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run("127.0.0.1:1", Stopper(), connect)


def test_an_error_at_the_start_is_one_line(tmp_path):
    """The folder or the port may be unusable."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirError):
        run("127.0.0.1:1", Stopper(), lambda _: None, tmp_path / "file" / "r")
    with pytest.raises(AddressError):
        run("nowhere", Stopper(), lambda _: None)
