"""Settings that a run keeps: a start with others is refused, and says which."""

import pytest

from fsl_async.config.fixed import FILE, fixed_settings, keep_settings
from fsl_async.config.load import load
from fsl_async.errors import RunDirError


def test_what_is_fixed_is_what_the_weights_and_their_evaluation_mean():
    """Marking one more, or one less, changes what users may do between two starts: that is decided
    here.
    """
    assert set(fixed_settings(load(None))) == {
        "run.seed",
        "outer.optimizer",
        "data.sharding",
        "data.holdout",
        "data.partition",
        "data.alpha",
        "model.family",
        "model.sizes",
        "model.preset",
        "model.layers",
        "model.width",
        "model.heads",
        "model.context",
        "split.method",
        "split.cut",
        "split.labels_at_home",
        "split.auxiliary",
        "split.lora_client",
        "split.lora_server",
        "split.lora_alpha",
        "split.models",
    }


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("model.preset=1m", 'model.preset = "3m", and this start has "1m":'),
        ("model.layers=5", "model.layers = 7, and this start has 5"),
        ("run.seed=4", "run.seed = 0, and this start has 4"),
        ("outer.optimizer=average", 'outer.optimizer = "nesterov", and this start has "average"'),
        ("data.sharding=local", 'data.sharding = "disjoint", and this start has "local"'),
        ("data.holdout=0.1", "data.holdout = 0.02, and this start has 0.1"),
    ],
)
def test_another_value_is_refused_with_both(tmp_path, changed, words):
    """Weights of one model must not be continued as another's, and the way on stands in the
    line.
    """
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
        "sync.first_grace_s=1",
        "listen.address=127.0.0.1:0",
        "outer.learning_rate=0.5",
        "codec.up=bf16",
        "train.learning_rate=0.01",
        "run.rounds=7",
        "checkpoint.keep_versions=9",
        "model.layers=7",  # what the preset means anyway
    ],
)
def test_what_only_says_how_the_run_goes_on_may_change(tmp_path, changed):
    """An operator tunes a running experiment without starting over."""
    keep_settings(tmp_path, load(None), -1)
    keep_settings(tmp_path, load(None, [changed]), 3)


def test_the_same_sizes_by_another_preset_are_the_same_model(tmp_path):
    """Only the sizes decide what is trained."""
    keep_settings(tmp_path, load(None), -1)
    sizes = ["model.layers=7", "model.width=192", "model.heads=6", "model.context=256"]
    keep_settings(tmp_path, load(None, ["model.preset=1m", *sizes]), 3)


def test_before_the_first_version_the_newest_start_counts(tmp_path):
    """A server started with a typing error and stopped has nothing that could be spoilt."""
    keep_settings(tmp_path, load(None), -1)
    keep_settings(tmp_path, load(None, ["model.preset=1m"]), -1)
    keep_settings(tmp_path, load(None, ["model.preset=1m"]), 0)
    with pytest.raises(RunDirError):
        keep_settings(tmp_path, load(None), 0)


def test_a_run_without_the_file_takes_what_it_is_started_with(tmp_path):
    """An operator who lost the file goes on; from then on starts are checked again."""
    keep_settings(tmp_path, load(None), 5)
    with pytest.raises(RunDirError):
        keep_settings(tmp_path, load(None, ["run.seed=1"]), 5)


def test_an_altered_digit_is_not_a_setting(tmp_path):
    """A seed of 1 instead of 0 is good JSON: without a checksum the run would go on with other
    data.
    """
    keep_settings(tmp_path, load(None), -1)
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes().replace(b'"run.seed":0', b'"run.seed":1'))
    with pytest.raises(RunDirError, match=r"settings\.json does not match its checksum; restore"):
        keep_settings(tmp_path, load(None, ["run.seed=1"]), 5)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"run.seed":0}', b"\xff{"])
def test_a_damaged_file_is_one_line(tmp_path, content):
    """It is not taken for an empty one, or the next start would decide."""
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunDirError, match="restore it from a backup"):
        keep_settings(tmp_path, load(None), 5)
