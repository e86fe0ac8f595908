"""The parameter server is asked to end while its run directory cannot be read."""

import asyncio
from types import SimpleNamespace

from fsl_async.nodes.ps.ending import ending
from fsl_async.process.stopper import ExitCode
from fsl_async.roles.sync.events import DamageRepaired


def test_a_directory_that_cannot_be_read_does_not_keep_a_server_from_its_end(tmp_path):
    """SIGTERM warns that deltas may be lost, and the process ends."""
    fed, said, finished = [], [], []

    def unsaved():
        raise NotADirectoryError(20, "Not a directory")

    async def ask():
        shell = SimpleNamespace(
            machine=SimpleNamespace(ended=False), node=SimpleNamespace(feed=fed.append)
        )
        stop = SimpleNamespace(comes_back=True, reason="SIGTERM", exit_code=ExitCode.RELAUNCH)
        journal = SimpleNamespace(say=said.append)
        asked = ending(stop, shell, journal, tmp_path, unsaved=unsaved, finish=finished.append)
        asked(False)
        await asyncio.sleep(0)

    asyncio.run(ask())
    (alarm,) = fed
    assert isinstance(alarm, DamageRepaired)
    assert "unknown which deltas would be lost: " in alarm.text
    assert [one.reason for one in finished] == ["SIGTERM"]
