"""Demos whose children die: the children's error is the verdict. Real processes, no nodes."""

import asyncio
import sys
import time
from types import SimpleNamespace

import pytest

from fsl_async.cluster.restarts import RestartRules
from fsl_async.cluster.supervisor import Child
from fsl_async.errors import FslError
from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo import groups, play, split
from fsl_async.tools.demo.settings import DemoSettings

FAST = RestartRules(first_wait_s=0.01, longest_wait_s=0.02, budget=1000)
SERVES = (
    'print(\'{"event": "listening", "role": "ps", "address": "tcp://127.0.0.1:1"}\', flush=True)\n'
    "import time; time.sleep(60)"
)
DIES = "import sys; sys.exit('error: torch has no Muon')"

COMMON = {"data": "", "clients": 2, "seed": 0, "preset": "0.5m"}
UNSEEN = SimpleNamespace(update=lambda *_: None, close=lambda: None)


def plain(folder):
    given = COMMON | {"seconds": 40.0, "format": "e5m2", "every_s": 4.0}
    return play.Demo(DemoSettings(**given, run_dir=folder), UNSEEN, Stopper())


def of_split(folder):
    given = COMMON | {"rounds": 9, "method": "sl", "number_format": "uniform"}
    return split.Play(split.SplitDemo(**given, run_dir=folder), lambda _: None, Stopper())


def of_groups(folder):
    given = COMMON | {"groups": 2, "seconds": 60.0, "every_s": 4.0, "global_s": 8.0}
    given |= {"number_format": "uniform", "ports": (1, 2)}
    return groups.Play(groups.GroupsDemo(**given, run_dir=folder), lambda _: None, Stopper())


@pytest.mark.parametrize(
    ("make", "module", "kind"),
    [
        (plain, play, DemoSettings),
        (of_split, split, split.SplitDemo),
        (of_groups, groups, groups.GroupsDemo),
    ],
)
def test_clients_that_only_die_are_the_verdict(tmp_path, monkeypatch, make, module, kind):
    """It was "no round was merged; give it more --seconds", after all of the seconds."""

    def script(name, text):
        return Child(name, (sys.executable, "-S", "-c", text))

    monkeypatch.setattr(module, "_RULES", FAST)
    monkeypatch.setattr(kind, "server", lambda _, name="server": script(name, SERVES))
    names = lambda words: next(word for word in words if "client" in word)  # noqa: E731
    monkeypatch.setattr(kind, "client", lambda _, *words: script(names(words), DIES))
    demo, begun = make(tmp_path), time.monotonic()
    with pytest.raises(FslError) as raised:
        asyncio.run(demo.play())
    assert time.monotonic() - begun < 20.0
    assert raised.value.exit_code == 1
    assert "client-1, " in raised.value.message
    assert raised.value.message.endswith(" times: torch has no Muon")
