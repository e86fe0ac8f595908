"""The data of clients.

Partitions over real sockets, data sets of every kind, and errors about wrong data.
"""

import gzip
import json

import numpy as np
import pytest

from fsl_async import cli
from fsl_async.config.load import load
from fsl_async.errors import ConfigError, DataError
from fsl_async.learn.data.dataset import Dataset
from fsl_async.learn.data.facts import described, facts_of
from fsl_async.learn.split.task import open_samples

CNN = ["split.method=splitfed-v2", "model.family=small-cnn", "model.sizes=width=4"]


@pytest.fixture
def reads(monkeypatch):
    """The samples that each data set object of this process has given, in order of opening."""
    found = []

    def read(data, indices):
        taken = np.asarray(indices)
        if not any(each is data for each, _ in found):
            found.append((data, set()))
        next(taken_before for each, taken_before in found if each is data).update(taken.tolist())
        return data._take(data._checked(taken))

    monkeypatch.setattr(Dataset, "read", read)
    return found


@pytest.mark.parametrize("how", ["iid", "dirichlet"])
def test_shards_are_disjoint_cover_the_data_and_stay(how, nodes, configured, images, reads):
    """Shards depend on a seed at the parameter server.

    Each site reads only its own, also after a relaunch in another order.
    """
    config = configured(
        *CNN,
        f"data.path={images(samples=50)}",
        f"data.partition={how}",
        "data.alpha=0.4",
        "split.samples=0",
        "train.batch=16",
    )
    names = ("site-a", "site-b")
    run = nodes(config, names=names)
    first = [taken for _, taken in reads]
    assert len(first) == 2
    assert not first[0] & first[1]
    assert first[0] | first[1] == set(range(50))
    sizes = [run.summaries[name].tokens for name in names]
    assert sorted(sizes) == sorted(map(len, first))
    assert (sizes[0] == sizes[1]) == (how == "iid")
    # A relaunched client has its lease in the ledger, in any order of launches.
    facts = [
        json.loads(line) for line in (run.run_dir / "ps" / "ledger.jsonl").read_text().splitlines()
    ]
    leases = {each["name"]: each["index"] for each in facts if each["fact"] == "lease"}
    found = described(config)
    again = {
        name: set(open_samples(found, facts_of(found), (leases[name], 2)).indices(0).tolist())
        for name in names
    }
    assert [len(again[name]) for name in names] == sizes
    assert {frozenset(taken) for taken in again.values()} == {frozenset(each) for each in first}


def cifar100(folder, samples=20):
    """Write a CIFAR-100 folder."""
    records = np.random.default_rng(0).integers(0, 256, (samples, 3074), dtype=np.uint8)
    records[:, 1] = np.arange(samples) * 7 % 100
    (folder / "train.bin").write_bytes(records.tobytes())
    return folder, records[:, 1]


def as_npz(folder, samples=20):
    """Write an archive with channels last."""
    labels = np.arange(samples) % 4
    path = folder / "x.npz"
    pixels = np.zeros((samples, 8, 8, 3)) + labels[:, None, None, None] * 60 + np.arange(3)
    np.savez(path, x_train=pixels.astype(np.uint8), y_train=labels)
    return path, labels


def zipped_idx(folder, images, samples=20):
    """Pack MNIST's files."""
    made = images(samples=samples, classes=10)
    for path in list(made.iterdir()):
        (folder / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    return folder, np.arange(samples) % 10


@pytest.mark.parametrize("kind", ["cifar100", "npz", "idx.gz"])
def test_every_kind_of_data_set_gives_its_labels_and_shape(kind, tmp_path, images):
    """A run reads the facts that it needs from its data.

    Shape as a model sees it, classes, samples of each class.
    """
    folder = tmp_path / "data"
    folder.mkdir()
    made = {"cifar100": cifar100, "npz": as_npz, "idx.gz": lambda it: zipped_idx(it, images)}
    path, labels = made[kind](folder)
    config = described(load(None, [*CNN, f"data.path={path}", "split.samples=0", "train.batch=8"]))
    shape = {"cifar100": (3, 32, 32), "npz": (3, 8, 8), "idx.gz": (1, 8, 8)}[kind]
    facts = facts_of(config)
    assert facts.shape == shape
    assert config.data.classes == {"cifar100": 100, "npz": 4, "idx.gz": 10}[kind]
    found = list(open_samples(config, facts, (0, 1)).round(0))
    assert sorted(int(one) for batch in found for one in batch.labels) == sorted(labels.tolist())
    assert all(batch.inputs.shape[1:] == shape for batch in found)
    assert all(-1 <= batch.inputs.min() <= batch.inputs.max() <= 1 for batch in found)
    if kind == "npz":  # pixels by label and channel
        for batch in found:
            for channel in range(3):
                expected = (batch.labels * 60 + channel) / 127.5 - 1
                assert bool(((batch.inputs[:, channel, 1, 2] - expected).abs() < 1e-6).all())


def test_rounds_walk_through_epochs_and_every_epoch_has_an_order_of_its_own(images, tmp_path):
    """A relaunched client needs no saved position, and no sample is favored."""
    more = [f"data.path={images(samples=20)}", "split.samples=6", "train.batch=4"]
    config = described(load(None, [*CNN, *more]))
    samples = open_samples(config, facts_of(config), (0, 1))
    taken = [samples.indices(number).tolist() for number in range(10)]
    walked = [one for each in taken for one in each]
    assert sorted(walked[:20]) == sorted(walked[20:40]) == list(range(20))
    assert walked[:20] != walked[20:40]
    again = open_samples(config, facts_of(config), (0, 1))
    assert again.indices(7).tolist() == taken[7]


def error_of(capsys, *arguments):
    """Run the command line; returns its one line of error."""
    assert cli.main(list(arguments)) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in lines if not line.startswith("warning: without effect")]
    assert len(lines) == 1, lines
    return lines[0]


def server(*sets, run_dir):
    """Arguments of a split server on ports of its own."""
    chosen = ["listen.address=127.0.0.1:0", "split.listen=127.0.0.1:0", *sets]
    flags = [part for each in chosen for part in ("--set", each)]
    return ["--role", "server", "--with-ps", "--run-dir", str(run_dir), *flags]


WRONG = {
    "a cut that does not exist": (
        ["split.cut=pool7"],
        "Sequential has no cut 'pool7'; cuts that exist: conv1, relu1, pool1, conv2",
    ),
    "a cut without weights in front": (
        ["model.family={own}:flat", "split.cut=0"],
        "cut '0' leaves no weights on one side; cuts with weights on both: 1, 2",
    ),
    "an auxiliary that is unknown": (
        ["split.method=fsl-sage", "split.auxiliary=cubic"],
        "split.auxiliary: must be linear, blocks:N or file.py:function",
    ),
    "alpha": (["data.partition=dirichlet", "data.alpha=0"], "data.alpha: must be above 0"),
    "more clients than samples": (
        ["sync.clients=61"],
        "61 clients, but 60 samples: give fewer clients or more data",
    ),
    "a model for text": (["model.family=gpt"], "samples of shape (8, 8), and gpt trains on text"),
    "another shape": (["data.sample_shape=3x32x32"], "data.sample_shape is 3x32x32, and data.path"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_settings_end_the_split_server_in_one_line(what, images, capsys, tmp_path):
    """Exit code 2 before any client can join, with the remedy."""
    sets, words = WRONG[what]
    own = tmp_path / "own.py"
    own.write_text(
        "from torch import nn\n"
        "def flat(shape, classes):\n"
        "    first, last = nn.Linear(64, 5), nn.Linear(5, classes)\n"
        "    return nn.Sequential(nn.Flatten(), first, nn.ReLU(), last)\n"
    )
    sets = [each.replace("{own}", str(own)) for each in sets]
    arguments = server(*CNN, f"data.path={images()}", *sets, run_dir=tmp_path / "run")
    assert words in error_of(capsys, *arguments)


def test_an_auxiliary_whose_output_does_not_fit_is_refused(images, capsys, tmp_path):
    """The user's own net with nine outputs for ten classes."""
    path = tmp_path / "own.py"
    path.write_text(
        "from torch import nn\n"
        "def nine(shape, outputs):\n"
        "    inputs = shape[0] * shape[1] * shape[2]\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, outputs - 1))\n"
    )
    sets = ["split.method=cse-fsl", *CNN[1:], f"data.path={images()}"]
    arguments = server(*sets, run_dir=tmp_path / "run")
    line = error_of(capsys, *arguments, "--auxiliary", f"{path}:nine")
    assert "gives (1, 9) for a batch where the split server's part gives (1, 10)" in line


def test_a_site_with_other_data_than_the_runs_is_refused(images):
    """Sites that partition different data would train some samples twice, and others never."""
    config = described(load(None, [*CNN, f"data.path={images()}"]))
    tables = {"data.path": str(images(samples=61, name="more")), "data.holdout": "0"}
    known = [
        f"data.{key}={json.dumps(getattr(config.data, key))}"
        for key in ("fingerprint", "sample_shape", "classes")
    ]
    other = load(None, [*CNN, *known, *(f"{k}={v}" for k, v in tables.items())])
    with pytest.raises(DataError, match="are not those of the run"):
        open_samples(other, facts_of(other), (0, 2))


def test_a_split_server_without_data_needs_their_shape_in_settings(tmp_path):
    """A split server does not need the data.

    Then shape and classes are settings.
    """
    with pytest.raises(ConfigError, match=r"data\.sample_shape and data\.classes"):
        facts_of(load(None, CNN))
    known = [*CNN, "data.sample_shape=1x8x8", "data.classes=10"]
    assert facts_of(described(load(None, known))).shape == (1, 8, 8)
