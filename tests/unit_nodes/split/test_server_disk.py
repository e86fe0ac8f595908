"""The split server's disk, and payloads that cross the cut.

They are read back unchanged, or refused.
"""

import numpy as np
import pytest
import torch

from fsl_async.errors import RunDirError
from fsl_async.learn.split import payload
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.roles.split.events import ClientProgress, SplitProgress, UploadKey

KEYS = [UploadKey("a", 7, 0, step) for step in range(4)]


def state(value):
    return {
        "server/w": torch.full((2, 3), float(value)),
        "steps": torch.tensor(value),
        "server/h": torch.full((2,), float(value), dtype=torch.bfloat16),
    }


def book(uploads):
    client = ClientProgress(7, KEYS[uploads - 1], 0)
    return SplitProgress("run-1", 0, -1, uploads, {"a": client})


def fill(run_dir):
    disk = ServerDisk(run_dir)
    disk.recover()
    for number, key in enumerate(KEYS, 1):
        disk.append("upload", key=key.text, outcome="trained", reason="")
        if number < 3:
            disk.stage(book(number), state(number), [("a", state(10 + number))])()
    disk.append("auxiliary", client="a", version=5)
    disk.close()


def test_a_restart_goes_on_from_the_newest_checkpoint(tmp_path):
    """Weights, book and ledger must be consistent; later uploads are recorded as lost."""
    fill(tmp_path)
    disk = ServerDisk(tmp_path)
    found = disk.recover()
    disk.close()
    assert found.book == book(2)
    assert found.lost == tuple(KEYS[2:])
    assert found.auxiliary_seen == {"a": 5}
    for name, tensor in state(2).items():
        assert torch.equal(found.common[name], tensor)
        assert found.common[name].dtype == tensor.dtype
    assert torch.equal(dict(found.clients)["a"]["server/w"], state(12)["server/w"])


def test_a_damaged_checkpoint_is_replaced_by_the_one_before(tmp_path):
    """A flipped bit loses the uploads since the checkpoint before, not the run."""
    fill(tmp_path)
    newest = max((tmp_path / "checkpoints").iterdir()) / "common.safetensors"
    data = bytearray(newest.read_bytes())
    data[-1] ^= 1
    newest.write_bytes(data)
    disk = ServerDisk(tmp_path)
    found = disk.recover()
    disk.close()
    assert found.book == book(1)
    assert found.lost == tuple(KEYS[1:])


def test_a_torn_line_of_the_ledger_is_cut_off(tmp_path):
    """An incomplete line after a crash must not join the next one."""
    fill(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(whole + b'{"key":"a/7/0')
    disk = ServerDisk(tmp_path)
    disk.recover()
    disk.close()
    assert ledger.read_bytes() == whole


def test_two_servers_do_not_share_a_folder(tmp_path):
    """Two writers would mix their weights."""
    disk = ServerDisk(tmp_path)
    with pytest.raises(RunDirError, match="another process uses"):
        ServerDisk(tmp_path)
    disk.close()


@pytest.mark.parametrize(("classes", "width"), [(10, 1), (256, 1), (257, 2), (70_000, 4)])
def test_labels_take_the_narrowest_integers(classes, width):
    """They are counted to the byte, and read back unchanged."""
    labels = np.array([0, classes - 1, 1], np.int64)
    packed = payload.pack_labels(labels, classes)
    assert len(packed) == width * 3
    assert (payload.unpack_labels(packed, 3, classes) == labels).all()
    labels[1] = payload.IGNORED
    packed = payload.pack_labels(labels, classes)
    assert (payload.unpack_labels(packed, 3, classes) == labels).all()


def test_padding_is_not_sent_and_is_restored():
    """Rows get their places back for all lengths."""
    values = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
    rows = payload.valid_rows(values, [1, 3])
    assert rows.shape == (4, 3)
    back = payload.put_back(rows, [1, 3], 4, 0.0)
    assert (back[0, :1] == values[0, :1]).all()
    assert (back[1, :3] == values[1, :3]).all()
    assert not back[0, 1:].any()


def test_frames_of_another_size_are_refused():
    """Received frames must have exactly the announced size."""
    values = np.ones(100, np.float32)
    frame = payload.encode_chunk(values, 0, payload.spec_for("fp32", 10))
    assert (payload.decode_chunks([frame], 100) == values).all()
    for frames, count in (([frame], 101), ([frame, frame], 100), ([frame[:-1]], 100)):
        with pytest.raises(payload.PayloadError):
            payload.decode_chunks(frames, count)
