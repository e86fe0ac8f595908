"""The address of a name: looked up once, cached, and used for longer if no resolver answers."""

import asyncio
import socket

import pytest

from fsl_transport.relay import resolver
from fsl_transport.relay.resolver import Resolver

NEW = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("2001:db8::1", 7100, 0, 0))
OLD = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 7100))


class Names:
    """A stand-in for a loop's clock and resolver, with given answers and times."""

    def __init__(self, monkeypatch):
        self.answers = []
        self.asked = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.now = 100.0
        monkeypatch.setattr(resolver.asyncio, "get_running_loop", lambda: self)

    def time(self):
        """Return a time that the test sets."""
        return self.now

    async def getaddrinfo(self, host, port, **wanted):
        """Return the next answer, or raise the next error."""
        self.asked += 1
        await self.may_answer.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_an_address_is_asked_for_once_and_kept_for_a_while(monkeypatch):
    """Also if many dial at once, and others soon after. IPv4 comes first."""

    async def main():
        names = Names(monkeypatch)
        names.answers = [[NEW, OLD], [NEW]]
        one = Resolver("ps.example.org:7100")
        names.may_answer.clear()
        asking = [asyncio.ensure_future(one.addresses()) for _ in range(5)]
        await asyncio.sleep(0)
        names.may_answer.set()
        for found in await asyncio.gather(*asking):
            assert found == [(OLD[0], OLD[4]), (NEW[0], NEW[4])]
        names.now += resolver.FRESH_S - 1
        await one.addresses()
        assert names.asked == 1
        names.now += 2
        assert await one.addresses() == [(NEW[0], NEW[4])]
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
def test_a_name_that_is_unknown_is_asked_for_again(monkeypatch, answer, problem):
    """Each time, and the problem is reported."""

    async def main():
        names = Names(monkeypatch)
        names.answers = [answer, [OLD]]
        one = Resolver("ps.example.org:7100")
        with pytest.raises(OSError, match=problem):
            await one.addresses()
        names.now += resolver.FRESH_S + 1
        assert await one.addresses() == [(OLD[0], OLD[4])]

    asyncio.run(main())


def test_the_last_address_is_used_while_no_resolver_answers(monkeypatch):
    """A resolver that is down for a night ends no run; a first lookup has a time limit."""
    monkeypatch.setattr(resolver, "REFRESH_S", 0.05)
    monkeypatch.setattr(resolver, "LOOKUP_S", 30.0)

    async def main():
        names = Names(monkeypatch)
        names.answers = [[OLD], socket.gaierror(socket.EAI_AGAIN, "try again")]
        other = Resolver("split.example.org:7100")
        one = Resolver("ps.example.org:7100")
        await one.addresses()
        names.now += resolver.FRESH_S + 1
        assert await one.addresses() == [(OLD[0], OLD[4])]
        names.may_answer.clear()
        assert await asyncio.wait_for(one.addresses(), 10) == [(OLD[0], OLD[4])]
        monkeypatch.setattr(resolver, "LOOKUP_S", 0.05)
        with pytest.raises(OSError, match=r"no name server answers for split\.example\.org"):
            await asyncio.wait_for(other.addresses(), 10)
        one.close()
        other.close()
        await asyncio.sleep(0)
        assert one._lookup is other._lookup is None

    asyncio.run(main())
