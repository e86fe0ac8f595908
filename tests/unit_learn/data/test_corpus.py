"""Text by byte position: the index, the shards, and one line for each unusable path."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_async.errors import DataError
from fsl_async.learn.data import corpus as data
from fsl_async.learn.data.corpus import Corpus, held_out_windows, windows


def written(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def names(corpus):
    return [name for name, _ in corpus.files]


def everything(corpus):
    out = np.zeros(corpus.bytes, np.uint8)
    corpus.read_into(0, out)
    return out.tobytes()


def test_a_directory_gives_its_text_files_in_the_order_of_their_paths(tmp_path):
    """Every site that holds the same tree must index the same bytes at the same positions."""
    written(
        tmp_path,
        {
            "b.txt": b"B" * 30,
            "a/z.PY": b"z" * 30,
            "a.md": b"a" * 30,
            "empty.txt": b"",
            "picture.png": b"no" * 30,
            "binary.txt": b"text\0text" * 9,
            ".hidden.txt": b"h" * 30,
            ".git/x.txt": b"h" * 30,
            "__pycache__/x.py": b"h" * 30,
            "lib/site-packages/x.py": b"h" * 30,
            "lib/dist-packages/x.py": b"h" * 30,
        },
    )
    (tmp_path / "link.txt").symlink_to(tmp_path / "b.txt")
    os.link(tmp_path / "b.txt", tmp_path / "second.txt")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    corpus = Corpus.open(tmp_path, context=4)
    assert names(corpus) == ["a.md", "a/z.PY", "b.txt"]
    assert everything(corpus) == b"a" * 30 + b"z" * 30 + b"B" * 30


def test_a_file_named_directly_may_hold_anything(tmp_path):
    """The rules for directories must not apply to a file that the user names."""
    path = tmp_path / "weights.bin"
    path.write_bytes(bytes(range(256)))
    corpus = Corpus.open(path, context=4)
    assert everything(corpus) == bytes(range(256))


def test_reading_crosses_files_and_survives_more_files_than_maps(tmp_path, monkeypatch):
    """Windows must cross files, and descriptors must not run out."""
    monkeypatch.setattr(data, "OPEN_MAPS", 2)
    written(tmp_path, {f"{i:03}.txt": bytes([i]) * (i % 5 + 1) for i in range(1, 60)})
    corpus = Corpus.open(tmp_path, context=4)
    whole = b"".join((tmp_path / name).read_bytes() for name in names(corpus))
    assert everything(corpus) == whole
    assert corpus._map.cache_info().currsize == 2
    out = np.zeros(17, np.uint8)
    for start in range(0, corpus.bytes - 17, 7):
        corpus.read_into(start, out)
        assert out.tobytes() == whole[start : start + 17]
    with pytest.raises(IndexError):
        corpus.read_into(corpus.bytes - 16, out)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 5000), st.integers(1, 40), st.integers(1, 12), st.floats(0, 0.5))
def test_shards_and_the_held_out_tail_are_disjoint_and_cover_everything(
    size, context, count, held_out
):
    """No byte may be trained on twice or be both trained on and evaluated."""
    try:
        corpus = Corpus(
            data.Path("x"),
            [("x", size)] if size else [],
            window_bytes=context + 1,
            held_out=held_out,
        )
        parts = [corpus.shard(index, count) for index in range(count)]
    except DataError as error:
        # A refusal is right only where the parts do not fit.
        tail = max(int(size * held_out), 4 * (context + 1)) if held_out else 0
        fits = (size - tail) // count >= context + 1
        if fits or "give more text" not in str(error):
            raise
        return
    edges = [part.start for part in parts] + [corpus.held_out.start, corpus.held_out.stop]
    assert [part.stop for part in parts] == edges[1 : count + 1]
    assert edges[0] == 0
    assert edges[-1] == size
    assert all(part.bytes >= context + 1 for part in parts)
    assert max(p.bytes for p in parts) - min(p.bytes for p in parts) <= 1
    if held_out:
        assert corpus.held_out.bytes >= 4 * (context + 1)


def test_windows_stay_inside_their_shard_and_reach_its_edges(tmp_path):
    """An off-by-one error would train on another shard's or the evaluation's bytes."""
    path = tmp_path / "x.txt"
    path.write_bytes(bytes(range(200)))
    corpus = Corpus.open(path, context=9)
    seen = set()
    for index in range(3):
        span = corpus.shard(index, 3)
        drawn = windows(corpus, span, batch=4, seed=1, name="a")
        own = set()
        for _ in range(200):
            batch = next(drawn)
            assert batch.shape == (4, 10)
            assert (np.diff(batch.astype(int)) == 1).all()
            own |= set(batch.ravel().tolist())
        assert own == set(range(span.start, span.stop))
        assert not own & seen
        seen |= own
    tail = np.concatenate(list(held_out_windows(corpus, batch=3, limit=100)))
    assert not set(tail.ravel().tolist()) & seen


def test_windows_repeat_by_seed_and_differ_by_name_and_by_the_version_joined_at(tmp_path):
    """Runs must repeat; clients of one shard, and relaunched ones, must draw other windows."""
    path = tmp_path / "x.txt"
    path.write_bytes(os.urandom(5000))
    corpus = Corpus.open(path, context=9)

    def first(**changed):
        how = {"batch": 8, "seed": 1, "name": "a", "start": 0} | changed
        return next(windows(corpus, corpus.shard(0, 2), **how)).tobytes()

    assert first() == first()
    assert len({first(), first(seed=2), first(name="b"), first(start=3)}) == 4


def test_held_out_windows_are_the_same_for_all_and_predict_each_byte_once(tmp_path):
    """Losses of nodes are compared, so they must be of the same bytes."""
    path = tmp_path / "x.txt"
    path.write_bytes(bytes(i % 251 for i in range(3000)))
    corpus = Corpus.open(path, context=10)
    whole = list(held_out_windows(corpus, batch=2, limit=10**6))
    assert [batch.shape for batch in whole] == [(2, 11)] * 2 + [(1, 11)]
    predicted = np.concatenate([batch[:, 1:].ravel() for batch in whole])
    tail = everything(corpus)[corpus.held_out.start :]
    assert predicted.tobytes() == tail[1 : 1 + len(predicted)]
    some = np.concatenate(list(held_out_windows(corpus, batch=2, limit=2)))
    assert some.shape == (2, 11)
    assert not list(held_out_windows(Corpus.open(path, context=10, held_out=0), batch=2, limit=9))


def test_the_fingerprint_depends_on_names_sizes_and_order(tmp_path):
    """Sites that index different data would otherwise overlap without an error."""
    trees = [
        {"a.txt": b"x" * 50, "b.txt": b"x" * 40},
        {"a.txt": b"x" * 40, "b.txt": b"x" * 50},
        {"a.txt": b"x" * 50, "c.txt": b"x" * 40},
        {"a.txt": b"x" * 90},
    ]
    found = [
        Corpus.open(written(tmp_path / str(i), tree), context=4).fingerprint
        for i, tree in enumerate(trees)
    ]
    assert len(set(found)) == 4
    again = Corpus.open(written(tmp_path / "again", trees[0]), context=4)
    assert again.fingerprint == found[0]
    assert len(found[0]) == 32


def test_each_fault_of_a_data_path_is_one_line_that_names_it(tmp_path):
    """A wrong path is a new user's first mistake, so its error must be clear."""
    written(tmp_path, {"folder/x.png": b"x" * 99, "empty.txt": b"", "short.txt": b"x" * 20})
    for path, text in {
        "missing.txt": r"cannot read data '.*missing.txt' \(No such file",
        "folder": r"folder' holds no text files",
        "empty.txt": "holds no bytes",
        "short.txt": r"has 20 bytes, but 55 are needed for a context of 10",
    }.items():
        with pytest.raises(DataError, match=text) as caught:
            Corpus.open(tmp_path / path, context=10)
        assert "\n" not in str(caught.value)
    corpus = Corpus.open(written(tmp_path, {"x.txt": b"x" * 100}) / "x.txt", context=10)
    with pytest.raises(DataError, match="cut in 9 leaves"):
        corpus.shard(3, 9)
    with pytest.raises(DataError, match="shard 2 of 2 does not exist"):
        corpus.shard(2, 2)
    with pytest.raises(DataError, match=r"model.context is 0"):
        Corpus.open(tmp_path, context=0)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_named(tmp_path):
    """Without the file this site's byte positions would differ from other sites'."""
    written(tmp_path, {"a.txt": b"x" * 99})
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DataError, match=r"a.txt' \(Permission denied\)"):
        Corpus.open(tmp_path, context=4)


def test_a_file_that_changes_while_in_use_is_an_error(tmp_path):
    """Reading past the end of a memory map kills a process without a message."""
    path = tmp_path / "x.txt"
    path.write_bytes(b"x" * 100)
    corpus = Corpus.open(path, context=4)
    path.write_bytes(b"x" * 50)
    with pytest.raises(DataError, match="had 100 bytes when it was indexed and has 50"):
        everything(corpus)
    path.unlink()
    with pytest.raises(DataError, match="cannot read data"):
        everything(corpus)


def test_only_regular_files_are_opened(tmp_path):
    """Opening a named pipe would block forever."""
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match="neither a file nor a directory"):
        Corpus.open(tmp_path / "pipe.txt", context=4)
    (tmp_path / "real.txt").write_bytes(b"x" * 100)
    assert [name for name, _ in Corpus.open(tmp_path, context=4).files] == ["real.txt"]
