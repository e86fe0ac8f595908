"""The server of the control room: token, Host, headers, read-only, and what a stream sends."""

import asyncio
import json
import socket

import pytest
from run_journals import JournalFile

from fsl_async.cli import main
from fsl_async.errors import AddressError

pytest.importorskip("aiohttp", reason="aiohttp (extra `web`) is not installed")

from fsl_async.errors import to_install
from fsl_async.tools.control_room import server
from fsl_async.tools.control_room.server import HEADERS, Gate, Room, application, event, stream
from fsl_async.tools.control_room.snapshot import watch


@pytest.fixture
def journal(tmp_path):
    made = JournalFile(tmp_path / "run")
    made.join(1.0, "a", "b")
    made.round(10.0, 0, {"a": 5.0, "b": 4.0})
    return made


def with_client(journal, check):
    from aiohttp.test_utils import TestClient, TestServer

    async def run():
        room = Room(watch(journal.path.parent))
        async with TestClient(TestServer(application(room))) as client:
            room.gate = Gate(client.port, "the-token")
            await check(client, room)

    asyncio.run(run())


def test_a_token_becomes_a_cookie_and_opens_the_page(journal):
    async def check(client, room):
        refused = await client.get("/")
        assert refused.status == 403
        assert "fsl-node status" in await refused.text()
        assert (await client.get("/?token=wrong")).status == 403
        redirect = await client.get("/?token=the-token", allow_redirects=False)
        assert (redirect.status, redirect.headers["Location"]) == (303, "/")
        cookie = redirect.headers["Set-Cookie"]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
        page = await client.get("/")
        assert page.status == 200
        assert "<script>" not in await page.text()

    with_client(journal, check)


@pytest.mark.parametrize(
    "path", ["/", "/events", "/state", "/assets/room.js", "/nothing", "/?token=x"]
)
def test_every_answer_has_the_headers_and_needs_the_token(journal, path):
    async def check(client, room):
        answer = await client.get(path)
        assert answer.status == 403
        assert HEADERS.items() <= dict(answer.headers).items()

    with_client(journal, check)


def test_foreign_hosts_and_other_methods_are_refused(journal):
    async def check(client, room):
        cookies = {"Cookie": f"{room.gate.cookie}=the-token"}
        evil = await client.get("/state", headers={**cookies, "Host": "evil.example"})
        assert evil.status == 421
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD"):
            answer = await client.request(method, "/state", headers=cookies)
            assert answer.status == 405
        for path in ("/assets/..%2f__init__.py", "/assets/server.py", "/assets/x", "/x"):
            assert (await client.get(path, headers=cookies)).status == 404
        for asset in server._ASSETS.iterdir():
            answer = await client.get(f"/assets/{asset.name}", headers=cookies)
            assert answer.status == 200
            assert HEADERS.items() <= dict(answer.headers).items()
            if asset.suffix == ".js":  # a browser refuses scripts of another type
                assert answer.content_type in {"text/javascript", "application/javascript"}

    with_client(journal, check)


async def first_events(room, last="drawn"):
    found = []
    async for message in stream(room):
        name, data = message.decode().removesuffix("\n\n").split("\n", 1)
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        if found[-1][0] == last:
            return found
    return found


def test_a_stream_begins_with_the_state_and_ends_its_turn_when_all_is_sent(journal):
    async def check():
        room = Room(watch(journal.path.parent))
        found = await first_events(room)
        assert found[0][0] == "state"
        assert found[0][1]["nodes"][0]["version"] == 1
        clients = [
            data["clients"] for name, data in found if name == "series" and "clients" in data
        ]
        assert clients[0]["b"]["loss"] == [4.0]

    asyncio.run(check())


def test_evaluations_that_are_no_numbers_do_not_end_a_stream(journal):
    row = '{"version": 1, "loss": 2.5, "of": "weights", "bits_per_byte": NaN, "accuracy": NaN}'
    (journal.path.parent / "evaluations.jsonl").write_text(row + "\n")

    async def check():
        room = Room(watch(journal.path.parent))
        _, room.nodes[0].evaluations = room.nodes[0].look()
        found = dict(await first_events(room))
        (sent,) = found["held_out"]["rows"]
        assert (sent["loss"], sent["bits_per_byte"], sent["accuracy"]) == (2.5, None, None)

    asyncio.run(check())


def test_text_of_the_network_cannot_end_an_event():
    found = event("state", {"text": "a\n\nevent: evil\ndata: 1\n\n\ud800"})
    assert found.count(b"\n") == 3


def test_a_taken_port_is_one_line(journal):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=f"127.0.0.1:{port} .*give another port"):
            server.run(journal.path.parent, port, print)


def test_without_aiohttp_one_line_says_what_to_install(journal, monkeypatch, capsys):
    monkeypatch.setattr(server.importlib.util, "find_spec", lambda _: None)
    assert main(["status", str(journal.path.parent), "--web"]) == 2
    assert to_install("web") in capsys.readouterr().err


def test_a_run_without_a_journal_is_one_line(tmp_path, capsys):
    assert main(["status", str(tmp_path), "--web", "0"]) == 2
    assert "no journal.jsonl" in capsys.readouterr().err
