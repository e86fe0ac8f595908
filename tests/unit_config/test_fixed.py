"""Settings that a run fixes: a start with other values is refused, and the error names them."""

import pytest

from fsl_async.config.fixed import FILE, fixed_settings, keep_settings
from fsl_async.config.load import load
from fsl_async.errors import RunDirError

FIXED = """
    run.seed outer.optimizer exchange.buffers data.sharding data.holdout data.partition
    data.alpha model.family model.sizes model.preset model.layers model.width model.heads
    model.context model.tokenizer model.vocabulary split.method split.cut split.labels_at_home
    split.auxiliary split.lora_client split.lora_server split.lora_alpha split.models
    tune.method tune.rule tune.rank tune.scale tune.targets tune.full tune.head tune.objective
    tune.labels tune.balance tune.trained_on tune.context tune.base_check tune.zo_probes
    tune.zo_steps tune.dp_epsilon tune.dp_delta tune.dp_clip tune.secure
"""


def test_what_is_fixed_is_what_the_weights_and_their_evaluation_mean():
    """This list is what users may not change between two starts: change it on purpose."""
    assert set(fixed_settings(load(None))) == set(FIXED.split())


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("model.preset=1m", 'model.preset = "3m", and this start has "1m":'),
        ("model.layers=5", "model.layers = 7, and this start has 5"),
        ("run.seed=4", "run.seed = 0, and this start has 4"),
        ("outer.optimizer=average", 'outer.optimizer = "growing", and this start has "average"'),
        ("data.sharding=local", 'data.sharding = "disjoint", and this start has "local"'),
        ("data.holdout=0.1", "data.holdout = 0.02, and this start has 0.1"),
    ],
)
def test_another_value_is_refused_with_both(tmp_path, changed, words):
    """Weights of one model must not be trained on as another's; the error has the remedy."""
    keep_settings(tmp_path, load(None), -1)
    with pytest.raises(RunDirError) as refused:
        keep_settings(tmp_path, load(None, [changed]), 3)
    assert f"{tmp_path} holds a run with {words}" in refused.value.message
    way = refused.value.message.partition("add --set ")[2].partition(";")[0]
    keep_settings(tmp_path, load(None, [changed, way]), 3)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "changed",
    [
        "sync.every_s=5",
        "sync.clients=9",
        "sync.quorum=1",
        "listen.address=127.0.0.1:0",
        "outer.learning_rate=0.5",
        "codec.up=bf16",
        "train.learning_rate=0.01",
        "run.rounds=7",
        "store.keep_versions=9",
        "model.layers=7",  # what the preset means anyway
    ],
)
def test_other_settings_may_change(tmp_path, changed):
    """An operator must be able to tune a running experiment."""
    keep_settings(tmp_path, load(None), -1)
    keep_settings(tmp_path, load(None, [changed]), 3)


def test_the_same_sizes_by_another_preset_are_the_same_model(tmp_path):
    """Only the sizes define the model."""
    keep_settings(tmp_path, load(None), -1)
    sizes = ["model.layers=7", "model.width=192", "model.heads=6", "model.context=256"]
    keep_settings(tmp_path, load(None, ["model.preset=1m", *sizes]), 3)


def test_before_the_first_version_the_newest_start_counts(tmp_path):
    """After a start with a typing error there are no weights that could be lost."""
    keep_settings(tmp_path, load(None), -1)
    keep_settings(tmp_path, load(None, ["model.preset=1m"]), -1)
    keep_settings(tmp_path, load(None, ["model.preset=1m"]), 0)
    with pytest.raises(RunDirError):
        keep_settings(tmp_path, load(None), 0)


def test_a_run_without_the_file_takes_what_it_is_started_with(tmp_path):
    """An operator who lost the file can start again; later starts are checked again."""
    keep_settings(tmp_path, load(None), 5)
    with pytest.raises(RunDirError):
        keep_settings(tmp_path, load(None, ["run.seed=1"]), 5)


def test_an_altered_digit_is_not_a_setting(tmp_path):
    """A seed of 1 instead of 0 is valid JSON: without a checksum the run would use other data."""
    keep_settings(tmp_path, load(None), -1)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b'"run.seed":0', b'"run.seed":1'))
    with pytest.raises(RunDirError, match=r"settings\.json does not match its checksum; restore"):
        keep_settings(tmp_path, load(None, ["run.seed=1"]), 5)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"run.seed":0}', b"\xff{"])
def test_a_damaged_file_is_one_line(tmp_path, content):
    """A damaged file must not count as a missing one, or the next start would decide."""
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunDirError, match="restore it from a backup"):
        keep_settings(tmp_path, load(None), 5)
