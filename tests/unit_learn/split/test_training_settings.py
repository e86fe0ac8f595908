"""Settings of split learning reach optimizers, rates, losses, adapters and images."""

import importlib.util
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from fsl_async.config.load import load, resolved, to_toml
from fsl_async.config.recipes import with_implied
from fsl_async.config.settings_training import SplitConfig
from fsl_async.errors import ConfigError
from fsl_async.learn.client.schedule import FINAL_RATE, Schedule
from fsl_async.learn.data.counter import random_words
from fsl_async.learn.data.facts import described, facts_of
from fsl_async.learn.split import task
from fsl_async.learn.split.build import (
    build_parts,
    build_server,
    client_options,
    loss_of,
    optimizer_of,
)
from fsl_async.learn.split.model_parts import (
    Optimizer,
    OptimizerSpec,
    Rates,
    ServerPart,
    ServerPartOptions,
)
from fsl_async.learn.split.smashed import IGNORED, Smashed
from fsl_async.learn.split.task import flipped_and_cropped, held_out, open_samples
from fsl_async.roles.split.methods import method_of
from fsl_async.roles.split.methods.base import Position

CPU = torch.device("cpu")
IMAGES = ["model.family=small-cnn", "data.sample_shape=3x8x8", "data.classes=4"]


@pytest.mark.parametrize(
    ("name", "kind", "more", "wanted"),
    [
        ("adam", torch.optim.Adam, "split.betas=0.8, 0.999", {"betas": (0.8, 0.999)}),
        ("adamw", torch.optim.AdamW, "split.betas=0.8, 0.999", {"betas": (0.8, 0.999)}),
        ("sgd", torch.optim.SGD, "split.momentum=0.9", {"momentum": 0.9}),
    ],
)
def test_all_settings_are_the_optimizers(name, kind, more, wanted):
    """Published runs name all of them; a default that stays would train another run."""
    sets = [f"split.optimizer={name}", "train.learning_rate=0.02", "train.weight_decay=0.3", more]
    spec = optimizer_of(load(None, ["split.method=fsl-sage", *IMAGES, *sets]))
    found = spec.build([nn.Parameter(torch.ones(1))])
    assert type(found) is kind
    assert found.param_groups[0].items() >= {"lr": 0.02, "weight_decay": 0.3, **wanted}.items()


def test_the_trained_auxiliary_model_has_an_optimizer_of_its_own():
    """In the published CSE-FSL code the client's decay is not the auxiliary model's."""
    sets = ["split.method=cse-fsl", *IMAGES, "train.learning_rate=0.02", "train.weight_decay=0.3"]
    found = client_options(load(None, sets))
    assert found.optimizer.weight_decay == 0.3
    own = found.auxiliary_optimizer
    assert (own.name, own.learning_rate, own.weight_decay) == ("adam", 0.02, 0.0)


def moves(rates, rounds, steps=1):
    """Return how far plain SGD at rate 1 moves a weight whose gradient is 1, step by step."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Optimizer(OptimizerSpec("sgd", 1.0, rates=rates), {"w": weight})
    found = []
    for number, _ in itertools.product(range(rounds), range(steps)):
        before = weight.item()
        optimizer.round = number
        optimizer.step([torch.ones(1)])
        found.append(before - weight.item())
    return found


def test_a_cosine_goes_by_rounds_as_torchs_does():
    """A client and the split server must have one rate in a round, also after a relaunch."""
    config = load(None, ["split.method=sl", *IMAGES, "split.schedule=cosine", "run.rounds=8"])
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(probe, 8, eta_min=FINAL_RATE)
    wanted = []
    for _ in range(8):
        wanted += [torchs.get_last_lr()[0]] * 2
        probe.step()
        torchs.step()
    assert moves(optimizer_of(config).rates, 8, steps=2) == pytest.approx(wanted, abs=1e-6)


def test_wsd_falls_over_the_last_share_of_the_rounds_and_warms_up_by_steps():
    """The decay's beginning is a setting, and a warm-up is the optimizer's own."""
    sets = ["split.schedule=wsd", "train.decay_share=0.5", "run.rounds=8"]
    config = load(None, ["split.method=sl", *IMAGES, *sets, "split.warmup_steps=3"])
    found = moves(optimizer_of(config).rates, 8)
    assert found == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.755, 0.51, 0.265], abs=1e-6)
    assert moves(OptimizerSpec().rates, 3) == [1, 1, 1]


def test_a_restored_split_server_does_not_warm_up_again():
    """Its moments are restored, so small steps would only lose time."""
    rates = Rates(Schedule("constant", warmup_steps=4))
    torch.manual_seed(0)
    part = ServerPart(nn.Linear(2, 2), ServerPartOptions(OptimizerSpec("sgd", 0.1, rates=rates)))
    data = Smashed(torch.ones(4, 2), torch.tensor([0, 1, 1, 1]))
    for number in range(2):
        part.begin_round(number)
        part.step(data, wants_gradient=False)
    again = ServerPart(nn.Linear(2, 2), ServerPartOptions(OptimizerSpec("sgd", 0.1, rates=rates)))
    again.restore(part.state())
    for one in (part, again):
        one.step(data, wants_gradient=False)
    assert all(map(torch.equal, part.model.parameters(), again.model.parameters()))


def test_label_smoothing_is_that_of_torch_at_both_ends():
    """Clients' and targets' losses differ where only one of them is smoothed."""
    config = load(None, ["split.method=fsl-sage", *IMAGES, "split.label_smoothing=0.1"])
    outputs, labels = torch.randn(5, 4), torch.tensor([0, 3, IGNORED, 1, 2])
    wanted = F.cross_entropy(outputs, labels, label_smoothing=0.1)
    server, *_ = build_server(config, CPU)
    for loss in (loss_of(config), client_options(config).loss, server.common.loss):
        assert torch.equal(loss(outputs, labels), wanted)


def test_the_minibatch_of_an_alignment_is_a_setting():
    """By default it is a training batch; published, the whole buffer. Never more than that."""
    common = ["split.method=fsl-sage", *IMAGES, "train.batch=16", "split.buffer_samples=100"]
    for given, wanted in ((0, 16), (40, 40), (1000, 100)):
        config = load(None, [*common, f"split.align_batch={given}"])
        server, *_ = build_server(config, CPU)
        assert server.settings.align.minibatch_samples == wanted


def test_alignment_can_be_off():
    """A run without it shows what alignment is worth."""
    method = method_of(SplitConfig(method="fsl-sage", align_every=0))
    assert not any(method.aligns_at(Position(number, 0)) for number in range(30))


@pytest.mark.parametrize(("every", "lines"), [(0, 0), (5, 1)])
def test_a_client_reports_a_missing_alignment_only_where_one_was_due(monkeypatch, every, lines):
    """A run without alignment must not look like one that ended too early."""
    method, said = method_of(SplitConfig(method="fsl-sage", align_every=every)), []
    monkeypatch.setattr(task, "_train", lambda _: SimpleNamespace(method=method, installed=0))
    task.train(SimpleNamespace(client_name="a", log=said.append))
    assert len(said) == lines


@pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf")
def test_adapters_have_their_dropout_on_every_side():
    """LoRA's published runs train with dropout."""
    sets = ["lora_client=2", "lora_server=3", "lora_dropout=0.25"]
    config = load(
        None,
        ["split.method=fsl-sage", "model.layers=3", "model.width=16", "model.heads=2"]
        + [f"split.{one}" for one in sets],
    )
    parts = build_parts(config, at_client=False)
    for part in (parts.model.client, parts.model.server, parts.auxiliary):
        shares = [one.p for one in part.modules() if isinstance(one, nn.Dropout)]
        assert shares
        assert set(shares) == {0.25}


def test_flips_and_crops_are_of_the_image():
    """An image must be mirrored left to right, and moved over black, not wrapped around."""
    image = np.arange(1.0, 13, dtype=np.float32).reshape(1, 3, 4)
    words = np.array([2 << 33 | 1 << 32 | 0, 1 << 33 | 0 << 32 | 2], np.uint64)
    found = flipped_and_cropped(np.stack([image, image]), words, flip=True, margin=1, fill=-1.0)
    assert found[0, 0].tolist() == [[-1] * 4, [-1, 4, 3, 2], [-1, 8, 7, 6]]
    assert found[1, 0].tolist() == [[5, 6, 7, 8], [9, 10, 11, 12], [-1] * 4]
    same = flipped_and_cropped(np.stack([image]), words[:1], flip=False, margin=0, fill=-1.0)
    assert same.tolist() == [image.tolist()]


def test_every_place_and_half_of_the_flips_are_drawn():
    """The shift must not depend on the flip, and both directions must be uniform."""
    images = np.zeros((4000, 1, 5, 5), np.float32)
    images[:, 0, 2, 2] = 1
    words = random_words(0, "x", len(images))
    found = flipped_and_cropped(images, words, flip=True, margin=2, fill=0.0)
    assert np.abs(found.mean(0) * 25 - 1).max() < 0.35
    assert abs((words >> np.uint64(32) & np.uint64(1)).mean() - 0.5) < 0.03


@pytest.fixture
def data(tmp_path):
    """Write an archive of bright images with a test part."""
    rng = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", 24), ("test", 8)):
        arrays[f"x_{split}"] = rng.integers(100, 256, (count, 8, 8, 3), dtype=np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 4
    np.savez(tmp_path / "images.npz", **arrays)
    return tmp_path / "images.npz"


def batches(data, part, number, *sets):
    found = ["split.method=sl", "model.family=small-cnn", f"data.path={data}", *sets]
    config = described(load(None, [*found, "split.samples=0", "train.batch=5"]))
    facts = facts_of(config)
    held = [batch.inputs for batch in held_out(config, facts)]
    return [one.inputs for one in open_samples(config, facts, (part, 2)).round(number)], held


def test_images_change_in_training_alone_and_the_same_way_after_a_relaunch(data):
    """A client that is launched again must train on the batches of before."""
    sets = ("data.flip=true", "data.crop=2")
    plain, held = batches(data, 0, 3)
    first, held_too = batches(data, 0, 3, *sets)
    again, _ = batches(data, 0, 3, *sets)
    assert [one.shape for one in first] == [one.shape for one in plain]
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first[:2], plain[:2]))
    assert all(map(torch.equal, held, held_too))
    black = torch.cat(first).eq(-1).all(1)
    assert black.any()
    assert not torch.cat(plain).eq(-1).all(1).any()
    later = batches(data, 0, 4, *sets)[0]
    assert (
        not torch.cat(first)
        .sum((1, 2, 3))
        .sort()[0]
        .equal(torch.cat(later).sum((1, 2, 3)).sort()[0])
    )


@pytest.mark.parametrize(
    ("sets", "text"),
    [
        (["split.momentum=0.9"], "split.momentum: is of sgd, and optimizer = adamw"),
        (["split.lora_dropout=0.1"], "split.lora_dropout: needs lora_client or lora_server"),
        (["split.betas=0.9"], "split.betas: must be like 0.9,0.999"),
        (["split.betas=0.9,1.0"], "split.betas: must be like 0.9,0.999"),
        (["split.schedule=cosine"], "split.schedule = cosine goes by the rounds of the run; set"),
        (["data.flip=true", "model.family=gpt"], "is for images, and model.family = gpt trains"),
    ],
)
def test_settings_that_contradict_each_other_are_one_line(sets, text):
    """A setting without effect must not look as if it had one."""
    with pytest.raises(ConfigError) as refused:
        with_implied(load(None, ["split.method=sl", "model.family=small-cnn", *sets]))
    assert text in refused.value.message


def test_rows_of_numbers_are_no_images(tmp_path):
    """A crop of what has no height and width is refused at every node, before it listens."""
    np.savez(tmp_path / "rows.npz", x_train=np.zeros((8, 5), np.float32), y_train=np.arange(8) % 2)
    sets = ["split.method=sl", f"data.path={tmp_path / 'rows.npz'}", "data.crop=1"]
    config = described(load(None, [*sets, "model.family=own"]))
    with pytest.raises(ConfigError, match=r"data.crop is for images, and samples have shape"):
        facts_of(config)


def test_a_preset_gives_way_to_what_is_given(tmp_path):
    """A published run is repeated with one setting, and varied with one more."""
    (tmp_path / "fsl.toml").write_text('[split]\npreset = "published-fsl-sage"\nalign_every = 5\n')
    found = load(tmp_path / "fsl.toml", ["train.batch=64"])
    split, train, own = found.split, found.train, optimizer_of(found)
    assert (split.align_every, train.batch) == (5, 64)
    assert (split.method, found.model.family, split.cut) == ("fsl-sage", "resnet18", "layer2")
    assert (split.upload_every, split.align_passes, split.align_batch) == (5, 100, 1000)
    assert (split.buffer_samples, split.align_rate) == (1000, 1e-3)
    assert (own.name, own.learning_rate, own.weight_decay) == ("adam", 1e-3, 1e-4)
    assert own.betas == (0.9, 0.999)
    assert (found.data.flip, found.data.crop) == (True, 4)
    with pytest.raises(ConfigError, match=r"split.preset: expected one of none, published-fsl-s"):
        load(None, ["split.preset=x"])


def test_a_preset_gives_way_to_defaults_that_are_written_out(tmp_path):
    """A value in a file that happens to be a default must not be replaced silently."""
    file = tmp_path / "fsl.toml"
    file.write_text(
        '[split]\npreset = "published-fsl-sage"\noptimizer = "adamw"\n[train]\nbatch = 16\n'
    )
    found = load(file)
    assert (found.split.optimizer, found.train.batch, found.split.cut) == ("adamw", 16, "layer2")
    # `init` writes all settings: there defaults give way.
    file.write_text(to_toml(load(None)))
    found = load(file, ["split.preset=published-fsl-sage", "data.flip=false"])
    assert (found.split.optimizer, found.train.batch, found.data.flip) == ("adam", 256, False)
    # What --dry-run prints is the same run.
    file.write_text(to_toml(resolved(found)))
    assert resolved(load(file)) == resolved(found)
