"""What trackers wrote, read back with their own packages; a second reader adds what is new."""

import json
import struct

import pytest
from tracked_run import EVERY_S, TrackedRun

from fsl_async.tools.trackers.outbox import Feed, Outbox

RUN = "run-1"
LOSSES = [(1, 3.0), (2, 1.5), (3, 1.0)]


@pytest.fixture
def run(tmp_path):
    made = TrackedRun(tmp_path / "run", RUN)
    made.join("a", "b")
    yield made
    made.writer.close()


def read(run, open_tracker):
    """What a reader does that is started, and ends."""
    run.flush()
    box = Outbox(open_tracker())
    Feed(run.folder, [box], lambda: box.send(0.0)).poll()
    assert box.close(0.0) == ""


def in_two_parts(run, open_tracker):
    """Two versions are read, then one more, then nothing new."""
    run.round("a", "b")
    run.round("a", "b")
    read(run, open_tracker)
    run.round("a", "b")
    read(run, open_tracker)
    read(run, open_tracker)


@pytest.mark.filterwarnings("ignore")
def test_tensorboard(run, tmp_path):
    """By its EventAccumulator: values, steps, and times of the journal."""
    module = "tensorboard.backend.event_processing.event_accumulator"
    events = pytest.importorskip(module, reason="the extra tensorboard is not installed")
    from fsl_async.tools.trackers.tensorboard import TensorBoard

    folder = tmp_path / "board" / RUN
    in_two_parts(run, lambda: TensorBoard(folder))
    found = events.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    scalars = found.Scalars("loss/mean")
    assert [(one.step, one.value) for one in scalars] == LOSSES
    assert scalars[1].wall_time - scalars[0].wall_time == EVERY_S
    assert [one.step for one in found.Scalars("tokens/merged")] == [0, 1, 2, 3]
    assert len(list(folder.iterdir())) == 2  # a reader with nothing to write leaves no file


@pytest.mark.filterwarnings("ignore")
def test_a_torn_event_file_is_continued(run, tmp_path):
    """A reader's machine lost power: what is whole counts, the rest is written again."""
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from fsl_async.tools.trackers.tensorboard import TensorBoard

    folder = tmp_path / RUN
    run.round("a", "b")
    run.round("a", "b")
    read(run, lambda: TensorBoard(folder))
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-10])
    assert Outbox(TensorBoard(folder)).last_step("") == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep
def test_mlflow(run, tmp_path):
    """By its client, from a database file."""
    pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="the extra mlflow is not installed")
    from mlflow.tracking import MlflowClient

    from fsl_async.tools.trackers.mlflow import EXPERIMENT, TAG, MLflow

    uri = f"sqlite:///{tmp_path}/ml.db"
    in_two_parts(run, lambda: MLflow(uri, RUN))
    client = MlflowClient(uri, uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.data.tags[TAG], found.info.status) == (RUN, "FINISHED")
    history = client.get_metric_history(found.info.run_id, "loss/mean")
    assert [(one.step, one.value) for one in history] == LOSSES
    assert history[1].timestamp - history[0].timestamp == EVERY_S * 1000


@pytest.mark.filterwarnings("ignore")
@pytest.mark.sweep
def test_weights_and_biases(run, tmp_path, monkeypatch):
    """Its offline folder, by its own records: one run, rows by version, nothing twice."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    from fsl_async.tools.trackers.weights_and_biases import WeightsAndBiases

    in_two_parts(run, lambda: WeightsAndBiases("p", RUN, tmp_path))
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{RUN}/run-{RUN}.wandb"))
    records = [one for path in files for one in records_of(path)]
    runs = {(one.run.run_id, one.run.project) for one in records if one.HasField("run")}
    assert runs == {(RUN, "p")}
    rows = [row_of(one.history) for one in records if one.HasField("history")]
    assert [(row["version"], row["loss/mean"]) for row in rows if "loss/mean" in row] == LOSSES
    assert rows[1]["_timestamp"] - rows[0]["_timestamp"] == EVERY_S
    assert not list(tmp_path.rglob("requirements.txt"))


def row_of(history):
    """The values of a row by name."""
    return {(*one.nested_key, one.key)[0]: json.loads(one.value_json) for one in history.item}


def records_of(path):
    """The records in a .wandb file: a log of LevelDB's form, with W&B's protocol buffers."""
    from wandb.proto import wandb_internal_pb2

    data, at, part = path.read_bytes(), 7, b""
    assert data.startswith(b":W&B")
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        part += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in {1, 4}:  # complete, or the last part
            yield wandb_internal_pb2.Record.FromString(part)
            part = b""
