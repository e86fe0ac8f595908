"""Texts of files, rows and streams: parts cover each once, and reading begins at any position."""

import json
import os
import re

import pytest
from token_texts import END, texts, write_lines, write_parquet, write_tokenizer

from fsl_async.errors import DataError, to_install
from fsl_async.learn.data import sources
from fsl_async.learn.data.sources import Location, location_of, open_documents, open_source
from fsl_async.learn.data.tokenizer import Bytes, coder_of, facts_of

ROWS = texts(230)
pytest.importorskip("pyarrow", reason="the extra hf is not installed")


@pytest.fixture(scope="module")
def datasets():
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    return pytest.importorskip("datasets", reason="the extra datasets is not installed")


def write(kind, folder):
    """The rows in that kind of data; returns what --data is."""
    if kind == "parquet":
        return str(write_parquet(folder / "p", ROWS))
    if kind == "jsonl":
        return str(write_lines(folder / "lines.jsonl", ROWS, "body")) + ":body"
    if kind == "saved":
        import datasets

        data = datasets.Dataset.from_dict({"n": list(range(len(ROWS))), "content": ROWS})
        data.save_to_disk(str(folder / "saved"), num_shards=2)
        return str(folder / "saved")
    if kind == "text":
        (folder / "t").mkdir()
        for file in range(3):
            rows = ROWS[file * 80 : (file + 1) * 80]
            (folder / "t" / f"{file}.txt").write_text("\n".join(rows) + "\n")
        return str(folder / "t")
    return f"hf://{write_parquet(folder / 'h', ROWS, files=4)}"


def read(source, epoch=0, at=0, resume=None):
    return list(source.read(epoch, at, resume))


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "saved", "text", "hub"])
def test_parts_and_what_is_held_out_are_each_text_once(kind, tmp_path, datasets, monkeypatch):
    """As a corpus is divided; reading again from a piece gives the rest."""
    monkeypatch.setattr(sources, "PIECE_BYTES", 300)
    where = location_of(write(kind, tmp_path))
    parts = [open_source(where, (index, 3), 0.1) for index in range(3)]
    found = [[piece.text for piece in read(part)] for part in parts]
    held_out = [text for part in parts for text in part.held_out()][:: 1 if kind == "hub" else 3]
    if kind == "text":  # cut where parts meet
        joined = "".join("".join(one) for one in found) + "".join(parts[0].held_out())
        assert joined == "".join(row + "\n" for row in ROWS)
    else:
        held_out = list(parts[0].held_out()) if kind != "hub" else held_out
        assert sorted([*(text for one in found for text in one), *held_out]) == sorted(ROWS)
    assert held_out
    assert min(map(len, found)) > 0
    for part, one in zip(parts, found, strict=True):
        pieces = read(part)
        for stop in (0, 1, len(pieces) // 2, len(pieces) - 1):
            piece = pieces[stop]
            assert [p.text for p in read(part, 0, piece.at)] == one[stop:]
            if kind == "hub":
                assert json.loads(json.dumps(piece.resume)) == piece.resume, "can be kept"
                assert [p.text for p in read(part, 0, piece.at, piece.resume)] == one[stop:]
                assert len(read(part, 1)) == len(one), "the next epoch is whole"
        assert not read(part, 0, 1 << 40) or kind == "hub"
    assert parts[0].fingerprint == open_source(where, (0, 3), 0.1).fingerprint


def test_texts_of_files_end_with_their_file(tmp_path):
    """A large file is read in pieces; characters are never cut within a part."""
    (tmp_path / "a.txt").write_text("ü" * 50_000)
    (tmp_path / "b.txt").write_text("b")
    data = open_documents(location_of(str(tmp_path)), 0.0)
    pieces = list(data.pieces(data.train))
    assert "".join(piece.text for piece in pieces) == "ü" * 50_000 + "b"
    assert [piece.ends for piece in pieces] == [False, True, True]
    (tmp_path / "b.txt").write_text("bbb")
    with pytest.raises(DataError, match="has changed since"):
        list(data.pieces(data.train))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hf://a/b", Location("hub", "a/b")),
        ("hf://a/b:c", Location("hub", "a/b", config="c")),
        ("hf://a/b::validation:body", Location("hub", "a/b", "body", split="validation")),
        ("x.parquet:body", Location("parquet", "x.parquet", "body")),
        ("x.txt", Location("text", "x.txt")),
    ],
)
def test_what_is_given_is_parsed(given, expected):
    """See docs/DATA.md."""
    assert location_of(given) == expected


def test_wrong_data_is_refused_in_one_line(tmp_path, datasets, monkeypatch):
    """Which data, what is wrong, what to do."""
    parquet = write_parquet(tmp_path / "p", ROWS, column="body")
    lines = write_lines(tmp_path / "l.jsonl", ROWS[:3])
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 3}\n[]\n')
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 no")
    empty = write_parquet(tmp_path / "e", [""][:0], files=1)
    cases = [
        (f"{parquet}", "no column text: name one with :COLUMN .columns: body"),
        (f"{parquet}:none", "no column 'none' of text"),
        (f"{lines}:none", "no text in 'none'; its names: text, n"),
        (f"{tmp_path / 'bad.jsonl'}", "byte 14: no text in 'text'"),
        (f"{tmp_path / 'damaged.parquet'}", "cannot read data"),
        (f"{empty}", "holds 0 rows"),
        (f"{tmp_path / 'nothing'}", "no such file"),
        (f"hf://{parquet}", "no column text: name one"),
        (f"hf://{tmp_path / 'nothing'}", "cannot be read"),
        (f"hf://{parquet}:::id", "holds int: name a column of text"),
        ("hf://:a", "write it as hf://NAME"),
        ("hf://pandas", "names a file format that datasets reads, not a data set"),
    ]
    for given, text in cases:
        with pytest.raises(DataError, match=text) as refused:
            read(open_source(location_of(given), (0, 1), 0.0))
        assert "\n" not in refused.value.message
    with pytest.raises(DataError, match="9 clients share them"):
        open_source(location_of(str(lines)), (0, 9999), 0.0)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=re.escape(f"needs datasets: {to_install('datasets')}")):
        open_source(location_of("hf://a/b"), (0, 1), 0.0)


def test_a_damaged_tokenizer_is_refused_in_one_line(tmp_path):
    """Numbers that are none, a panic of the package, and ids that it gives otherwise."""
    unigram = {"type": "Unigram", "vocab": [["a", 0.0], [END, -1.0]]}
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2}, "unk_token": "a"}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    added = [{"id": index, "content": name} | flags for index, name in enumerate((END, "zz"))]
    charsmap = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    cases = [
        ('{"model": {"vocab": {"a": 1e999}}}', "has no vocabulary"),
        (json.dumps({"model": unigram, "normalizer": charsmap}), "cannot be read by this version"),
        (
            json.dumps({"version": "1.0", "model": words, "added_tokens": added}),
            r"token '<\|endoftext\|>' has the id 0 in the file, and 3 when",
        ),
    ]
    path = tmp_path / "tokenizer.json"
    for text, reason in cases:
        path.write_text(text)
        with pytest.raises(DataError, match=reason) as refused:
            coder_of(facts_of(str(path)))
        assert "\n" not in refused.value.message


def test_the_facts_of_a_tokenizer_follow_from_its_file(tmp_path, monkeypatch):
    """No package is needed; the same file elsewhere, written otherwise, is the same."""
    path = write_tokenizer(tmp_path / "one")
    facts = facts_of(str(path))
    assert (facts.vocabulary, facts.end) == (1010, 1009)
    members = json.loads(path.read_text())
    members["truncation"] = {"max_length": 3, "direction": "Right", "stride": 0,
                             "strategy": "LongestFirst"}  # fmt: skip
    other = tmp_path / "two"
    other.mkdir()
    (other / "tokenizer.json").write_text(json.dumps(members, indent=4))
    again = facts_of(str(other))
    assert again.digest == facts.digest
    (tokens,) = coder_of(again).encode(["alpha w3 other beta alpha"])
    assert tokens.tolist() == [1, 12, 0, 2, 1], "nothing is truncated"
    assert facts_of(str(write_tokenizer(tmp_path / "three", 999))).digest != facts.digest
    write_tokenizer(tmp_path / "four", end="<stop>")
    with pytest.raises(DataError, match="no end-of-text token"):
        facts_of(str(tmp_path / "four"))
    (tmp_path / "four" / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert facts_of(str(tmp_path / "four")).end == 1009
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(DataError, match="damaged"):
        facts_of(str(tmp_path / "bad.json"))
    (tmp_path / "bad.json").write_text('{"model": {"vocab": {"a": -3}}}')
    with pytest.raises(DataError, match="it is damaged"):
        facts_of(str(tmp_path / "bad.json"))
    (tmp_path / "bad.json").write_text('{"model": {"vocab": 3}}')
    with pytest.raises(DataError, match="no vocabulary"):
        facts_of(str(tmp_path / "bad.json"))
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(DataError, match="needs tokenizers: "):
        coder_of(facts)
    assert END in path.read_text()


def test_bytes_are_tokens_and_a_text_ends_with_what_no_text_has():
    """Of any text."""
    (tokens,) = Bytes().encode(["aü\ud800"])
    assert tokens.tolist() == [97, 195, 188, 63]
    assert Bytes.end == 255
