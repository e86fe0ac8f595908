"""Checks of uploads before anything is received.

One client must not end the split server, or fill its memory.
"""

import pytest
import torch
from torch import nn

from fsl_async.config.load import load
from fsl_async.config.settings_training import SplitConfig
from fsl_async.errors import RunDirError
from fsl_async.learn.split.build import build_server
from fsl_async.learn.split.model_parts import AlignSettings, ServerPartOptions
from fsl_async.learn.split.payload import Payload
from fsl_async.learn.split.server_disk import ServerDisk
from fsl_async.learn.split.server_training import (
    MAX_VALUES,
    ServerTraining,
    SplitServer,
    UploadShape,
)
from fsl_async.learn.split.smashed import Smashed
from fsl_async.roles.split import effects as split
from fsl_async.roles.split.events import SplitProgress
from fsl_async.roles.split.messages import UploadKey
from fsl_async.roles.split.methods import method_of

KEY = UploadKey("a", 1, 0, 0)


@pytest.fixture
def training(tmp_path):
    """(setting ...) -> the parts of a split server."""
    made = []

    def make(*sets):
        config = load(None, ["split.method=splitfed-v2", "train.device=cpu", *sets])
        if made:
            made[-1].disk.close()
        server, method, uploads, _ = build_server(config, torch.device("cpu"))
        made.append(ServerTraining(method, server, uploads, ServerDisk(tmp_path)))
        return made[-1]

    yield make
    for each in made:
        each.disk.close()


def train(one, values, labels):
    """Put an upload and train on it."""
    one.put(KEY, Payload(values.reshape(-1).numpy(), tuple(values.shape), bytes(labels)))
    return one.train(split.TrainUpload(KEY, wants_answer=True, version=0))


GPT = ["model.layers=2", "model.width=16", "model.heads=2", "model.context=8"]


@pytest.mark.parametrize(
    ("shape", "lengths", "samples", "labels", "words"),
    [
        ((2, 8, 16), (), 2, 16, None),
        ((11, 16), (8, 3), 2, 11, None),
        ((2, 9, 16), (), 2, 18, "sequences must have 1 to 8 tokens"),
        ((12, 16), (9, 3), 2, 12, "sequences must have 1 to 8 tokens"),
        ((2, 0, 16), (), 2, 0, "sequences must have 1 to 8 tokens"),
        ((2,), (), 2, 2, "sequences must have 1 to 8 tokens"),
        ((2, 8, 15), (), 2, 16, "the cut has (-1, 16)"),
        ((2, 8, 16), (), 3, 16, "samples do not fit"),
        ((11, 16), (8, 4), 2, 11, "lengths do not fit"),
        ((2, 8, 16), (), 2, 17, "labels do not fit"),
        ((MAX_VALUES, 16), (), MAX_VALUES, 1, f"more than {MAX_VALUES} values"),
        ((1 << 21, 16), (8, *[1] * ((1 << 21) - 8)), (1 << 21) - 7, 1 << 21, None),
        ((1 << 22, 16), (8, *[1] * ((1 << 22) - 8)), (1 << 22) - 7, 1 << 22, "once padded"),
    ],
)
def test_what_is_announced_must_fit_the_cut(shape, lengths, samples, labels, words, training):  # noqa: PLR0917
    """Padding is restored at the split server: few bytes sent must not become gigabytes."""
    found = training(*GPT).objection(shape, lengths, samples, labels)
    assert (found is None) == (words is None), found
    assert words is None or words in found


def test_a_batch_that_the_model_cannot_train_is_refused(training):
    """Batch norm behind the cut of ResNet-18 cannot train on a batch of one image."""
    one = training("model.family=resnet18", "data.sample_shape=3x32x32", "data.classes=10")
    refused = train(one, torch.rand(1, 128, 4, 4), [3])
    assert "Expected more than 1 value per channel" in refused.problem
    assert train(one, torch.rand(2, 128, 4, 4), [3, 4]).answer


def test_an_alignment_that_fails_changes_nothing(tmp_path):
    """Batch norm behind the cut cannot use one image; that must not end the run for all."""
    torch.manual_seed(0)
    found = method_of(SplitConfig(method="fsl-sage"))
    server = SplitServer(
        nn.Sequential(nn.Conv2d(2, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3, 4)),
        ServerPartOptions(align=AlignSettings(passes=1)),
        nn.Sequential(nn.Flatten(), nn.Linear(8, 4)),
    )
    disk = ServerDisk(tmp_path)
    one = ServerTraining(found, server, UploadShape((2, 2, 2), 4, per_token=False), disk)
    server.alignment("a").remember(Smashed(torch.rand(1, 2, 2, 2), torch.tensor([1])))
    before = one.auxiliary("a")
    aligned = one.align(split.Align("a", 1, 0))
    assert "Expected more than 1 value per channel" in aligned.problem
    assert (one.auxiliary("a") == before).all()
    server.alignment("a").remember(Smashed(torch.rand(2, 2, 2, 2), torch.tensor([1, 2])))
    assert one.align(split.Align("a", 2, 1)).problem is None
    disk.close()


def test_a_checkpoint_of_another_model_is_one_line(training):
    """A restart with data of other classes is bad input, not a bug."""
    sets = ["model.family=small-cnn", "data.sample_shape=3x8x8"]
    one = training(*sets, "data.classes=4")
    one.copy(split.Checkpoint(SplitProgress()))()
    with pytest.raises(RunDirError, match="holds a split server of another model") as caught:
        training(*sets, "data.classes=6").recover()
    assert "\n" not in caught.value.message
    assert training(*sets, "data.classes=4").recover().progress == SplitProgress()


def test_labels_out_of_range_are_refused(training):
    """With ten classes, label eleven would make torch read beyond its table."""
    one = training(
        "model.family=small-cnn",
        "data.sample_shape=1x8x8",
        "data.classes=10",
        "model.sizes=width=4",
    )
    assert "labels must be" in train(one, torch.rand(2, 4, 4, 4), [3, 11]).problem
    assert train(one, torch.rand(2, 4, 4, 4), [3, 9]).problem is None
