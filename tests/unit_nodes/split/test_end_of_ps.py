"""Which ends of a parameter server a split server elsewhere hears of: those of the run, and no other."""

import asyncio

import pytest

from fsl_async.config.load import load
from fsl_async.errors import RunDirError
from fsl_async.nodes.ps import node as node_ps
from fsl_async.nodes.ps.run_end_notifier import RunEndNotifier
from fsl_async.nodes.ps.shell import ParameterServerShell
from fsl_async.process.stopper import Stopper


class Listened(RunEndNotifier):
    """One that dials nobody, and keeps what it was told."""

    said: tuple[str, ...] = ()

    def __init__(self, *facts):
        super().__init__(*facts, keys=None, log=lambda _: None, dials=False)

    def run_ended(self, reason):
        """Keep it."""
        Listened.said += (reason,)
        super().run_ended(reason)


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A function that serves until `end(stop)`, called once clients can come, has its effect; returns the reasons that were told."""
    monkeypatch.setattr(Listened, "said", ())

    def serve(end):
        stop = Stopper()
        chosen = ("listen.address=tcp://127.0.0.1:0",)
        (tmp_path / "run").mkdir()
        with node_ps.prepared(
            load(None, chosen),
            tmp_path / "run",
            node_ps.Options(announce=lambda _: end(stop), log=lambda _: None, stop=stop),
            notifier=Listened,
        ) as run:
            asyncio.run(asyncio.wait_for(run(load(None, chosen)), 60.0))

    return serve


def test_the_end_of_the_run_is_told(served):
    """Asked once, it stops its clients, and the run is over."""
    served(lambda stop: stop.request(reason="Ctrl-C"))
    assert Listened.said == ("Ctrl-C",)


def test_an_end_at_once_is_not(served):
    """Clients hear nothing, and go on with the process that comes next: a split server that had ended would refuse them for good."""
    served(lambda stop: stop.request(hard=True, reason="Ctrl-C"))
    assert Listened.said == ()


def test_a_failure_is_not(served, monkeypatch):
    """It asks for another start, in the same run."""
    shells = []
    start = ParameterServerShell.start
    monkeypatch.setattr(
        ParameterServerShell,
        "start",
        lambda shell, found: (shells.append(shell), start(shell, found)),
    )
    with pytest.raises(RunDirError, match="start this server again"):
        served(lambda _: shells[0].jobs.failed("start this server again"))
    assert Listened.said == ()


def test_who_was_told_nothing_keeps_nobody_waiting(monkeypatch):
    """A parameter server that failed is started again as soon as it is gone."""

    async def waited():
        await asyncio.wait_for(Listened(load(None, ()), "run", None, None).wait(), 1.0)

    asyncio.run(waited())
