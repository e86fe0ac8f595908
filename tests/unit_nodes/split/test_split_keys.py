"""Split learning with keys.

Both connections are encrypted; clients get the split server's key from the parameter server.
"""

import pytest

from fsl_async.keys.allow_list import Entry
from fsl_async.keys.folder import KeysFolder
from fsl_async.observe.journal import JournalReader


@pytest.fixture
def keys(tmp_path):
    folder = KeysFolder(tmp_path / "keys")
    public = folder.make_pair().public
    folder.change_allowed(lambda before: before.with_entry(Entry(public, "all")))
    return folder


@pytest.mark.parametrize("apart", [False, True])
def test_activations_and_weights_go_encrypted(nodes, configured, text, keys, apart):
    """Activations reveal much about inputs, and labels are sent as they are.

    The second connection needs a key as much as the first.
    """
    config = configured("split.method=fsl-sage", f"data.path={text}", "run.rounds=2")
    run = nodes(config, apart=apart, keys=keys)
    root = keys.path.parent / "run"
    split = root / ("split/server" if apart else "server")
    started = [
        line["encrypted"]
        for folder in (split, root / "ps")
        for line in JournalReader(folder / "journal.jsonl").read()
        if line["type"] == "node_started"
    ]
    assert started == [True, True]
    assert sorted(line.split()[0] for line in (split / "names.txt").read_text().splitlines()) == [
        "site-a",
        "site-b",
    ]
    assert sum(run.summaries[name].steps for name in run.names) > 0


def test_a_client_without_its_key_is_not_left_waiting(nodes, configured, text, keys):
    """A parameter server on loopback sends an address without a key.

    The client reports an error and makes no unencrypted connection.
    """
    config = configured("split.method=fsl-sage", f"data.path={text}", "split.server=192.0.2.1:7101")
    run = nodes(config, keys=keys, failing=True)
    found = [error for name, error in run.errors.items() if name.startswith("site")]
    assert found
    assert "names a split server without a key" in str(found[0])
