"""Data sets written by Hugging Face's `save_to_disk`. Most tests need pyarrow."""

import importlib.util
import io
import json
import re
import sys

import numpy as np
import pytest

from fsl_async.errors import DataError, to_install
from fsl_async.learn.data.facts import open_dataset
from fsl_async.learn.data.hub import open_saved

HAS_PYARROW = importlib.util.find_spec("pyarrow") is not None
needs_pyarrow = pytest.mark.skipif(not HAS_PYARROW, reason="pyarrow is an extra")
VALUES = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12], [13, 14, 15]]
LABELS = [0, 2, 1, 1, 0]


def saved(folder, columns, names=None, files=2):
    """Write the files that `datasets.Dataset.save_to_disk` writes."""
    import pyarrow as pa

    folder.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    step = -(-len(table) // files)
    listed = []
    for number in range(files):
        name = f"data-{number:05}-of-{files:05}.arrow"
        listed.append({"filename": name})
        part = table.slice(number * step, step)
        sink = pa.OSFile(str(folder / name), "wb")
        with sink, pa.ipc.new_stream(sink, part.schema) as writer:
            writer.write_table(part, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": listed}))
    features = {"label": {"names": names, "_type": "ClassLabel"}} if names else {}
    (folder / "dataset_info.json").write_text(json.dumps({"features": features}))
    return folder


def refused(match, *args, **how):
    with pytest.raises(DataError, match=match) as caught:
        open_saved(*args, **how)
    assert "\n" not in str(caught.value)


def test_without_pyarrow_one_line_says_what_to_install(tmp_path, monkeypatch):
    """Without the extra the error must be one line that names it, not a traceback."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=re.escape("needs pyarrow: " + to_install("datasets"))):
        open_dataset(tmp_path)


@needs_pyarrow
def test_lists_of_numbers_with_class_labels(tmp_path):
    """Samples span files and batches; the number of classes comes from the features."""
    folder = saved(tmp_path, {"x": VALUES, "label": LABELS}, names=list("abcd"))
    data = open_dataset(folder)
    assert (data.samples, data.sample_shape, data.classes) == (5, (3,), 4)
    assert data.labels.tolist() == LABELS
    assert data.read([4, 0, 2, 2]).tolist() == [VALUES[i] for i in (4, 0, 2, 2)]
    assert data.label_counts() == (2, 2, 1, 0)


@needs_pyarrow
def test_splits(tmp_path):
    """A saved DatasetDict is a folder of folders."""
    saved(tmp_path / "train", {"x": VALUES, "label": LABELS})
    saved(tmp_path / "validation", {"x": VALUES[:2], "label": LABELS[:2]})
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    assert open_dataset(tmp_path).samples == 5
    assert open_dataset(tmp_path, split="test").samples == 2
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["all"]}))
    refused("has no train split: all", tmp_path)


@needs_pyarrow
def test_text_and_lists_of_different_lengths_come_as_rows(tmp_path):
    """Language data are not rectangular, so `rows` must give them one by one."""
    texts = ["one", "zwölf", ""]
    data = open_saved(saved(tmp_path / "t", {"text": texts}))
    assert data.sample_shape == (-1,)
    assert data.labels is None
    assert [row.tobytes().decode() for row in data.rows([1, 0, 2])] == ["zwölf", "one", ""]
    with pytest.raises(DataError, match=r"take them with rows\(\)"):
        data.read([0])
    data = open_saved(saved(tmp_path / "i", {"input_ids": [[1], [2, 3], [4]]}))
    assert data.sample_shape == (-1,)
    assert [row.tolist() for row in data.rows([0, 1])] == [[1], [2, 3]]


@needs_pyarrow
def test_nested_lists_and_plain_numbers(tmp_path):
    """Arrays of two dimensions are lists of lists on disk."""
    deep = np.arange(24, dtype=np.float32).reshape(4, 3, 2)
    data = open_saved(saved(tmp_path / "d", {"pixel_values": deep.tolist()}))
    assert data.sample_shape == (3, 2)
    assert (data.read([3, 1]) == deep[[3, 1]]).all()
    data = open_saved(saved(tmp_path / "n", {"x": [0.5, 1.5], "y": [0, 1]}))
    assert data.sample_shape == ()
    assert data.read([1]).tolist() == [1.5]


@needs_pyarrow
def test_images(tmp_path):
    """An Image column is a struct of encoded bytes."""
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), np.uint8)
    cells = []
    for one in pixels:
        stream = io.BytesIO()
        image.fromarray(one).save(stream, "PNG")
        cells.append({"bytes": stream.getvalue(), "path": None})
    data = open_saved(saved(tmp_path / "i", {"image": cells, "label": [0, 1]}, files=1))
    assert data.sample_shape == (3, 5, 4)
    assert (data.read([1, 0]) == pixels[[1, 0]].transpose(0, 3, 1, 2)).all()
    cells[1]["bytes"] = cells[1]["bytes"][:40]
    data = open_saved(saved(tmp_path / "i", {"image": cells, "label": [0, 1]}, files=1))
    with pytest.raises(DataError, match="a damaged image"):
        data.read([1])


@needs_pyarrow
def test_damaged_and_unusable_folders(tmp_path):
    """Each fault must be one line that names the folder or file."""
    folder = saved(tmp_path / "a", {"x": VALUES, "label": LABELS}, names=["a", "b"])
    refused(r"sample 1: label 2 is not in 0 \.\.\. 1", folder)
    refused(
        r"none of its columns \(q\) has a name of samples: image, img",
        saved(tmp_path / "b", {"q": [1]}, files=1),
    )
    refused("labels must be integers", saved(tmp_path / "c", {"x": [1], "y": ["a"]}, files=1))
    refused("lacks 1 labels", saved(tmp_path / "d", {"x": [1, 2], "y": [1, None]}, files=1))
    first = folder / "data-00000-of-00002.arrow"
    whole = first.read_bytes()
    first.write_bytes(whole[: len(whole) // 2])
    refused("data-00000-of-00002.arrow' is short or damaged", folder)
    first.unlink()
    refused("cannot read data .*data-00000", folder)
    (folder / "state.json").write_text(json.dumps({"_data_files": []}))
    refused("is short or damaged", folder)
    (folder / "state.json").write_text("{")
    refused("state.json' is short or damaged", folder)
    for state in ('{"_data_files": ["a"]}', '{"_data_files": 5}', "[" * 100_000):
        (folder / "state.json").write_text(state)
        refused("is short or damaged", folder)
    (folder / "state.json").write_text(json.dumps({"_indices_files": [{}], "_data_files": []}))
    refused("flatten_indices", folder)
