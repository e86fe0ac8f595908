"""The address behind a name: asked for once, kept for a while, and for longer where nobody answers."""

import asyncio
import socket

import pytest

from fsl_transport import LocalError
from fsl_transport.loop import run
from fsl_transport.relay import resolver as lookup
from fsl_transport.relay.resolver import Lookup

NEW = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 7100, 0, 0))
OLD = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 7100))
LINK = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fe80::1", 7100, 0, 3))


class Names:
    """A loop's clock and resolver, and nothing else of it: what it answers, and when."""

    def __init__(self, monkeypatch):
        self.answers = []
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.now = 100.0
        monkeypatch.setattr(lookup.asyncio, "get_running_loop", lambda: self)

    def time(self):
        """A time that stands still."""
        return self.now

    async def getaddrinfo(self, host, port, **wanted):
        """The next answer, or error."""
        self.asked += 1
        await self.may_answer.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_address_is_asked_for_once_and_kept_for_a_while(monkeypatch):
    """Of many who dial at once, and those soon after them. IPv4 first."""

    async def main():
        names = Names(monkeypatch)
        names.answers = [[NEW, OLD], [NEW]]
        one = Lookup("ps.example.org:7100")
        names.may_answer.clear()
        asking = [asyncio.ensure_future(one.places()) for _ in range(5)]
        await asyncio.sleep(0)
        names.may_answer.set()
        for found in await asyncio.gather(*asking):
            assert found == [(OLD[0], OLD[4]), (NEW[0], NEW[4])]
        names.now += lookup.LOOKED_UP_S - 1
        await one.places()
        assert names.asked == 1
        names.now += 2
        assert await one.places() == [(NEW[0], NEW[4])]
        assert names.asked == 2

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "name or service not known",
        ),
        (UnicodeError("label too long"), "label too long"),
        ([], "no address"),
    ],
    ids=["no such name", "no name", "nothing"],
)
def test_a_name_that_nobody_knows_is_asked_for_again(monkeypatch, answer, problem):
    """Each time, and the problem is said."""

    async def main():
        names = Names(monkeypatch)
        names.answers = [answer, [OLD]]
        one = Lookup("ps.example.org:7100")
        assert await one.places() == []
        assert one.problem == problem
        names.now += lookup.LOOKED_UP_S + 1
        assert await one.places() == [(OLD[0], OLD[4])]

    asyncio.run(main())


def test_the_last_address_is_used_while_nobody_answers(monkeypatch):
    """A resolver that is away for a night ends no run; without an earlier answer nobody waits for it for ever."""
    monkeypatch.setattr(lookup, "NEWER_ANSWER_S", 0.05)
    monkeypatch.setattr(lookup, "ANSWER_S", 30.0)

    async def main():
        names = Names(monkeypatch)
        names.answers = [[OLD], socket.gaierror(socket.EAI_AGAIN, "try again")]
        other = Lookup("split.example.org:7100")
        one = Lookup("ps.example.org:7100")
        await one.places()
        names.now += lookup.LOOKED_UP_S + 1
        assert await one.places() == [(OLD[0], OLD[4])]
        names.may_answer.clear()
        assert await asyncio.wait_for(one.places(), 10) == [(OLD[0], OLD[4])]
        monkeypatch.setattr(lookup, "ANSWER_S", 0.05)
        assert await asyncio.wait_for(other.places(), 10) == []
        assert other.problem == "nobody says where split.example.org is"
        one.close()
        other.close()
        await asyncio.sleep(0)
        assert one._asking is other._asking is None

    asyncio.run(main())


def test_a_links_own_address_keeps_its_link(monkeypatch):
    """Loops take host and port of it, and without the link there is no such host."""

    async def main():
        names = Names(monkeypatch)
        names.answers = [[LINK]]
        one = Lookup("[fe80::1%eth0]:7100")
        assert await one.places() == [(socket.AF_INET6, ("fe80::1%3", 7100, 0, 3))]

    asyncio.run(main())


def test_real_names_are_found():
    """Of this machine."""

    async def main():
        for text, place in (("127.0.0.1:7100", "127.0.0.1"), ("localhost:7100", "127.0.0.1")):
            found = await Lookup(text).places()
            assert found[0] == (socket.AF_INET, (place, 7100))

    run(main())
    with pytest.raises(LocalError):
        Lookup("no port")
