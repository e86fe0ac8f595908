"""Rows of jsonl, JSON and CSV files as samples: what is recognized, skipped, and refused."""

import json
import tracemalloc

import pytest

from fsl_async.errors import DataError
from fsl_async.learn.tune import records
from fsl_async.learn.tune.records import Message, Records, Sample

LABELS = ("negative", "positive")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path, objective="lm", labels=LABELS):
    return list(Records(path, objective, labels))


TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CHAT = (Message("user", "2+2?"), Message("assistant", "4"))


@pytest.mark.parametrize(
    ("objective", "row", "described", "sample"),
    [
        ("classify", {"text": "good", "label": 1}, "text + label", Sample("good", 1)),
        (
            "classify",
            {"sentence": "bad", "label": "negative"},
            "sentence + label",
            Sample("bad", 0),
        ),
        ("classify", {"text": "good", "target": "1"}, "text + target", Sample("good", 1)),
        (
            "lm",
            {"prompt": "2+2?", "completion": "4"},
            "prompt + completion",
            Sample(prompt="2+2?", completion="4"),
        ),
        (
            "lm",
            {"instruction": "Add.", "input": "2 and 2", "output": "4"},
            "instruction + input + output",
            Sample(prompt="Add.\n\n2 and 2", completion="4"),
        ),
        (
            "lm",
            {"question": "2+2?", "answer": 4},
            "question + answer",
            Sample(prompt="2+2?", completion="4"),
        ),
        ("lm", {"messages": TURNS}, "messages", Sample(messages=CHAT)),
        (
            "lm",
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": [{"type": "text", "text": "4"}]},
                ]
            },
            "conversations",
            Sample(messages=CHAT),
        ),
        ("lm", {"text": "Once.", "label": 1}, "text", Sample("Once.")),
        (
            "dpo",
            {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
            "prompt + chosen + rejected",
            Sample(prompt="2+2?", completion="4", rejected="5"),
        ),
        (
            "dpo",
            {"chosen": TURNS, "rejected": [TURNS[0], {"role": "assistant", "content": "5"}]},
            "chosen + rejected",
            Sample(messages=CHAT[:1], completion="4", rejected="5"),
        ),
    ],
)
def test_the_usual_columns_are_recognized(tmp_path, objective, row, described, sample):
    """People bring files as they are; each needs no option."""
    found = Records(jsonl(tmp_path / "a.jsonl", [row]), objective, LABELS)
    assert found.columns.described == described
    assert list(found) == [sample]


def test_formats_give_the_same_samples(tmp_path):
    """The format is found by name and first character, and quoted fields keep their lines."""
    rows = [{"text": 'He said "hi",\nthen ü.', "label": 0}, {"text": "x", "label": 1}]
    wanted = [Sample(rows[0]["text"], 0), Sample("x", 1)]
    jsonl(tmp_path / "a.jsonl", rows)
    jsonl(tmp_path / "lines.json", rows)
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")
    table = 'text,label\r\n"He said ""hi"",\nthen ü.",0\r\nx,1\r\n'
    (tmp_path / "c.csv").write_text(table, encoding="utf-8-sig", newline="")
    (tmp_path / "d.csv").write_text(table.replace(",0", ";0").replace(",1", ";1").replace(
        "text,", "text;"), encoding="utf-8", newline="")  # fmt: skip
    for name in ("a.jsonl", "lines.json", "b.json", "c.csv", "d.csv"):
        assert read(tmp_path / name, "classify") == wanted, name
    assert read(tmp_path, "classify") == wanted * 5


def test_a_row_that_does_not_fit_is_skipped_and_the_first_one_is_named(tmp_path):
    """A torn last line or an empty field must not stop a run, nor go unseen."""
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 30)
    with path.open("a") as stream:
        stream.write('\n{"prompt": "a", "completion": " "}\n[1]\n{"prompt": "a", "comp')
    found = Records(path, "lm")
    assert len(list(found)) == found.rows == 30
    assert found.skipped == 3
    assert found.first_skip == "a.jsonl, line 32: completion is no text"
    assert len(list(found)) == 30, "it can be read again"
    assert found.skipped == 3


def test_lines_are_counted_through_quoted_fields(tmp_path):
    """A spreadsheet's row 3 may be line 5 of its file."""
    (tmp_path / "a.csv").write_text('text,label\n"a\nb\nc",0\nshort\nx,\n')
    found = Records(tmp_path / "a.csv", "classify", LABELS)
    assert list(found) == [Sample("a\nb\nc", 0)]
    assert found.skipped == 2
    assert found.first_skip == "a.csv, line 5: 1 fields, and 2 columns"


def test_an_unknown_label_is_an_error_that_names_the_known_ones(tmp_path):
    """Skipped, it would train a model without a class of the site's."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": 1}, {"text": "x", "label": "maybe"}])
    with pytest.raises(DataError, match=r"a.jsonl', line 2: label 'maybe' .* negative, positive"):
        read(path, "classify")
    for wrong in (2, -1, "2", 0.5, [1]):
        jsonl(path, [{"text": "x", "label": wrong}])
        with pytest.raises(DataError, match=r"line 1: label .* is not a label"):
            read(path, "classify")
    for right in (0, "0", "negative", " negative ", 0.0):
        jsonl(path, [{"text": "x", "label": right}])
        assert read(path, "classify") == [Sample("x", 0)]
    jsonl(path, [{"text": "x", "label": False}])
    assert read(path, "classify", ("true", "false")) == [Sample("x", 1)]


def test_columns_that_the_objective_lacks_are_an_error(tmp_path):
    """The message names what is there and what is needed."""
    path = jsonl(tmp_path / "a.jsonl", [{"body": "x", "note": "y", "label": None}])
    for objective, needed in (("lm", "or text"), ("classify", "text and label"), ("dpo", "chosen")):
        with pytest.raises(DataError, match=f"holds body, note, and {objective} needs .*{needed}"):
            Records(path, objective, LABELS)
    jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "completion": "y"}])
    jsonl(path, [{"text": "x"}])
    with pytest.raises(DataError, match="files of one kind"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.txt", b"hello", "name it .jsonl"),
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"not json\n", "holds no column .it is no JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        ("a.json", b'[{"text": "x"},\n{"text": "y"', "line 2: the object that begins here"),
        ("a.json", b'[{"text": "x"},\n7]', "line 2: the array ends too early, or holds other"),
        ("a.json", b'[{"text": "x"}', "line 1: the array ends too early"),
        ("a.json", b'[{"text": "\xff"}]', "not UTF-8"),
        ("a.csv", b'text,label\n"x,1\ny,0\n', "quote missing"),
        ("a.csv", b"text,text\nx,1\n", "two columns have one name"),
        ("a.jsonl", b'{"text": " "}\n', "no row can be used; the first, a.jsonl, line 1"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', "half a character"),
        ("a.jsonl", b"[" * 100_000 + b'\n{"text": 1', "no JSON"),
    ],
)
def test_damage_is_one_line_with_the_place(tmp_path, name, data, match):
    """Whatever is in a file, people get one line that they can act on."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=match) as found:
        read(tmp_path / name, labels=LABELS)
    assert "\n" not in found.value.message
    assert name in found.value.message


def test_paths_without_data_are_errors(tmp_path):
    """Found before a model is loaded."""
    with pytest.raises(DataError, match="neither a file nor a folder"):
        Records(tmp_path / "none", "lm")
    with pytest.raises(DataError, match=r"no .jsonl .ndjson"):
        Records(tmp_path, "lm")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_record_has_a_largest_length(tmp_path, monkeypatch, name):
    """A file of another kind is not read into memory in search of its first line's end."""
    monkeypatch.setattr(records, "LINE_BYTES", 1000)
    monkeypatch.setattr(records, "PIECE_BYTES", 100)
    head = {"a.jsonl": '{"text": "', "a.json": '[{"text": "', "a.csv": 'text\n"'}[name]
    monkeypatch.setattr(records.csv, "field_size_limit", lambda *_: 131_072)
    (tmp_path / name).write_text(head + "x" * 200_000)
    with pytest.raises(DataError, match=r"longer than|damaged or longer"):
        read(tmp_path / name)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_files_are_streamed(tmp_path, monkeypatch, name):
    """A file of a gigabyte is never held, and an object may be longer than a piece."""
    monkeypatch.setattr(records, "PIECE_BYTES", 1 << 12)
    row = json.dumps({"text": "ü" * 5000}, ensure_ascii=False)
    rows = 400
    between = "\n" if name == "a.jsonl" else ",\n"
    text = between.join([row] * rows)
    path = tmp_path / name
    path.write_text(text if name == "a.jsonl" else f"[{text}]", encoding="utf-8")
    found = Records(path, "lm")
    tracemalloc.start()
    try:
        assert sum(sample.text == "ü" * 5000 for sample in found) == rows
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20 < path.stat().st_size / 3
