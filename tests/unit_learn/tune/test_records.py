"""Rows of files and data sets as samples: which are recognized, skipped, and refused."""

import gzip
import importlib.util
import json
import tracemalloc
from itertools import islice

import pytest

from fsl_async.errors import DataError
from fsl_async.learn.tune import rows as files
from fsl_async.learn.tune.records import Records, Sample, check_records, parse_columns
from fsl_async.learn.tune.rows import csv_rows
from fsl_async.learn.tune.templates import Chat

LABELS = ("negative", "positive")


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path, objective="lm", labels=LABELS, columns=""):
    return list(Records(path, objective, labels, columns=columns))


def used(path, objective="classify", labels=LABELS):
    """Texts of the samples, and the line about the rows."""
    found = Records(path, objective, labels)
    return [sample.text for sample in found], found.used


TURNS = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
WRONG = [TURNS[0], {"role": "assistant", "content": "5"}]
CHAT = Chat(tuple(TURNS), trained=(1,))
OTHER = Chat(tuple(WRONG), trained=(1,))
ASKED = {"role": "user", "content": "2+\n\n2?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


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
        ("classify", {"Text": "good", "target": "1"}, "Text + target", Sample("good", 1)),
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
        ("lm", {"messages": TURNS}, "messages", Sample(chats=(CHAT,))),
        (
            "lm",
            {"messages": json.dumps(TURNS), "tools": json.dumps([TOOL]), "system": "Add."},
            "messages + tools + system",
            Sample(chats=(Chat(({"role": "system", "content": "Add."}, *TURNS), (2,), (TOOL,)),)),
        ),
        (
            "lm",
            {"instruction": "2+", "input": "2?", "output": "4", "tools": [TOOL]},
            "instruction + input + output + tools",
            Sample(chats=(Chat((ASKED, TURNS[1]), (1,), (TOOL,)),)),
        ),
        (
            "lm",
            {"prompt": TURNS[:1], "completion": TURNS[1:]},
            "prompt + completion",
            Sample(chats=(CHAT,)),
        ),
        (
            "lm",
            {
                "conversations": [
                    {"from": "human", "value": "2+2?"},
                    {"from": "gpt", "value": [{"type": "text", "text": "4"}]},
                ]
            },
            "conversations",
            Sample(chats=(CHAT,)),
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
            {"chosen": TURNS, "rejected": WRONG},
            "chosen + rejected",
            Sample(chats=(CHAT, OTHER)),
        ),
        (
            "dpo",
            {"prompt": TURNS[:1], "chosen": TURNS[1:], "rejected": WRONG[1:], "tools": [TOOL]},
            "prompt + chosen + rejected + tools",
            Sample(chats=(Chat(CHAT.turns, (1,), (TOOL,)), Chat(OTHER.turns, (1,), (TOOL,)))),
        ),
        (
            "dpo",
            {"prompt": "2+2?", "chosen": TURNS[1:], "rejected": WRONG[1:]},
            "prompt + chosen + rejected",
            Sample(chats=(CHAT, OTHER)),
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
    (tmp_path / "README.txt").write_text("Not data.")
    assert read(tmp_path, "classify") == wanted * 5


def test_a_row_that_does_not_fit_is_skipped_and_counted_by_its_reason(tmp_path):
    """A torn last line or an empty field must not stop a run, nor go unseen."""
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}] * 30)
    with path.open("a") as stream:
        stream.write('\n{"prompt": "a", "completion": " "}\n[1]\n{"prompt": "a", "comp')
    found = Records(path, "lm")
    assert len(list(found)) == found.rows == 30
    line = (
        "30 of 33 rows used; 1 without completion (line 32), 1 that are no JSON object (line 33),"
        " 1 that are no JSON (line 34)"
    )
    assert found.used == line
    assert len(list(found)) == 30, "it can be read again"
    assert found.used == line


def test_lines_are_counted_through_quoted_fields(tmp_path):
    """A spreadsheet's row 3 may be line 5 of its file."""
    (tmp_path / "a.csv").write_text('text,label\n"a\nb\nc",0\nshort\nx,\n')
    assert used(tmp_path / "a.csv") == (
        ["a\nb\nc"],
        "1 of 3 rows used; 1 with 1 field (line 5), 1 without label (line 6)",
    )


def test_an_unknown_label_is_an_error_that_names_the_known_ones(tmp_path):
    """Skipped, it would train a model without a class of the site's."""
    path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": 1}, {"text": "x", "label": "maybe"}])
    with pytest.raises(DataError, match=r"a.jsonl', line 2: label 'maybe' .* negative, positive"):
        read(path, "classify")
    for wrong in (2, -1, "2", 0.5, [1], "1.5", "yes"):
        jsonl(path, [{"text": "x", "label": wrong}])
        with pytest.raises(DataError, match=r"line 1: label .* is not a label"):
            read(path, "classify")


@pytest.mark.parametrize(
    ("labels", "zero", "one"),
    [
        (LABELS, (0, "0", "0.0", 0.0, "negative", " negative ", False, "False"), (1, "1.0", True)),
        (("true", "false"), (True, "true", "TRUE", 0), (False, "False", 1)),
        (("5", "1"), (5, "5.0"), (1, "1", True)),
    ],
)
def test_labels_are_names_or_numbers(tmp_path, labels, zero, one):
    """Spreadsheets write 0.0 and False; labels that are named by numbers are names alone."""
    for number, values in enumerate((zero, one)):
        for value in values:
            path = jsonl(tmp_path / "a.jsonl", [{"text": "x", "label": value}])
            if labels == ("5", "1") and value is True:
                with pytest.raises(DataError, match="not a label"):
                    read(path, "classify", labels)
            else:
                assert read(path, "classify", labels) == [Sample("x", number)], value


def test_columns_that_the_objective_lacks_are_an_error(tmp_path):
    """The message names what is there and what is needed."""
    path = jsonl(tmp_path / "a.jsonl", [{"body": "x", "note": "y", "label": None}])
    for objective, needed in (("lm", "or text"), ("classify", "text and label"), ("dpo", "chosen")):
        with pytest.raises(
            DataError, match=f"holds body, note, label .empty., and {objective} needs .*{needed}"
        ):
            Records(path, objective, LABELS)
    jsonl(tmp_path / "b.jsonl", [{"prompt": "x", "completion": "y"}])
    jsonl(path, [{"text": "x"}])
    with pytest.raises(DataError, match="files of one kind"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("a.doc", b"hello", "name it .jsonl"),
        ("a.jsonl", b"", "no rows"),
        ("a.jsonl", b"not json\n", "no row can be used: the first are rows that are no JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "line 2 is not UTF-8"),
        ("a.json", b'[{"text": "x"},\n{"text": "y"', "is damaged .*line 2 column"),
        ("a.json", b"[7]", "no row can be used: the first are rows that are no JSON object"),
        ("a.json", b'[{"text": "x"}', "is damaged .*line 1 column"),
        ("a.json", b"[" * 100_000, "is damaged .*recursion"),
        ("a.json", b'[{"text": "\xff"}]', "not UTF-8"),
        ("a.csv", b'text,label\n"x,1\n', "the first are rows with a stray quote"),
        ("a.csv", b"\n\n", "line 1 names no columns"),
        ("a.csv", "text,label\nx,1\n".encode("utf-16-le"), "zero bytes"),
        ("a.csv", "text,label\nx,1\n".encode("utf-16")[:-3], "is not UTF-16"),
        ("a.csv.gz", gzip.compress(b"text,label\nx,1\n", mtime=0)[:-9], "short or damaged"),
        ("a.parquet", b"PAR1", "cannot read data"),
        ("a.csv", b"text,text\nx,1\n", "two columns have one name"),
        ("a.jsonl", b'{"text": " "}\n', "no row can be used: 1 without text .line 1"),
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
    with pytest.raises(DataError, match=r"no .jsonl .ndjson .* files"):
        Records(tmp_path, "lm")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_a_record_has_a_largest_length(tmp_path, monkeypatch, name):
    """A file of another kind is not read into memory in search of its first line's end."""
    monkeypatch.setattr(files, "LINE_CHARACTERS", 1000)
    monkeypatch.setattr(files, "ARRAY_CHARACTERS", 1000)
    head = {"a.jsonl": '{"text": "', "a.json": '[{"text": "', "a.csv": 'text\n"'}[name]
    (tmp_path / name).write_text(head + "x" * 200_000)
    with pytest.raises(DataError, match="longer than"):
        read(tmp_path / name)


def test_files_are_streamed(tmp_path):
    """A file of a gigabyte is never held."""
    row = json.dumps({"text": "ü" * 5000}, ensure_ascii=False)
    rows = 400
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([row] * rows), encoding="utf-8")
    found = Records(path, "lm")
    tracemalloc.start()
    try:
        assert sum(sample.text == "ü" * 5000 for sample in found) == rows
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20 < path.stat().st_size / 3


@pytest.mark.parametrize(
    ("rows", "texts", "line"),
    [
        # Never closed: it would swallow the rest.
        (['"a,1', "b,0", "c,1"], ["b", "c"], "2 of 3 rows used; 1 with a stray quote (line 2)"),
        # Closed by the quote of another row.
        (
            ['"a,1', "b,0", '"c, d",1'],
            ["b", "c, d"],
            "2 of 3 rows used; 1 with a stray quote (line 2)",
        ),
        (['"a "b" c",1', "b,0"], ["b"], "1 of 2 rows used; 1 with a stray quote (line 2)"),
        # What is left of a broken row of several lines is no row.
        (
            ['"a', 'said "hi"', 'end",1', "b,0"],
            ["b"],
            "1 of 4 rows used; 2 with a stray quote (line 2, line 4), 1 with 1 field (line 3)",
        ),
        (['5" nails,1', '"x""y",0'], ['5" nails', 'x"y'], "2 of 2 rows used"),
        (['"a\nb, c\nd",1'], ["a\nb, c\nd"], "1 of 1 rows used"),
        (["a,1,,", "b,0,more"], ["a"], "1 of 2 rows used; 1 with 3 fields (line 3)"),
    ],
)
def test_a_stray_quote_costs_a_row(tmp_path, rows, texts, line):
    """Notes hold quotes, and one of them must not take the rest of the file with it."""
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text,label", *rows]) + "\n")
    assert used(path) == (texts, line)


def test_a_quote_that_nothing_closes_is_given_up():
    """At the largest length of a row: a file of gigabytes is not held in search of its end."""

    def lines():
        yield from enumerate(("text,label\n", '"x,1\n'), 1)
        for number in range(3, 400):
            yield number, "y,0\n"
        raise AssertionError("it reads on")

    found = csv_rows(lines(), "a.csv", longest=1000)
    assert next(found)[0] == 2
    assert list(islice(found, 100)) == [(n, {"text": "y", "label": "0"}) for n in range(3, 103)]


def test_many_open_quotes_do_not_read_the_file_again_and_again():
    """Each line begins a row of all that follows; the last row is read all the same."""
    read = [0]

    def counted():
        for number, text in enumerate(
            ["text,label\n", *['x","\n'] * 3000, "y,0\n", '"y\nz",0\n'], 1
        ):
            read[0] = number
            yield number, text

    rows = csv_rows(counted(), "a.csv", longest=1 << 20)
    next(rows)
    assert read[0] <= files.MOST_LINES + 2
    (*stray, one, other) = rows
    assert {str(row) for _, row in stray} == {"with a stray quote"}
    assert [row["text"] for _, row in (one, other)] == ["y", "y\nz"]


@pytest.mark.parametrize("coding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
@pytest.mark.parametrize("packs", [bytes, gzip.compress])
def test_text_is_read_by_its_mark_and_unpacked(tmp_path, coding, packs):
    """Excel saves "Unicode text" as UTF-16 with tabs."""
    table = "text\tlabel\r\nü €\t1\r\n"
    row = '{"text": "ü €", "label": "positive"}\n'
    end = ".gz" if packs is gzip.compress else ""
    for name, text in (("a.txt", "ü €\n\n"), ("a.tsv", table), ("a.csv", table), ("a.jsonl", row),
                       ("a.json", f"[{row}]")):  # fmt: skip
        path = tmp_path / (name + end)
        path.write_bytes(packs(text.encode(coding)))
        objective = "lm" if name == "a.txt" else "classify"
        assert used(path, objective) == (["ü €"], "1 of 1 rows used")


def test_columns_are_named_by_option(tmp_path):
    """Only what is named changes; a column that is not there is refused with those that are."""
    path = jsonl(tmp_path / "a.jsonl", [{"Note": "x", "text": "y", "Kind": 1, "messages": TURNS}])
    assert read(path, "classify", columns="text=Note,label=Kind") == [Sample("x", 1)]
    assert read(path, "classify", columns="label = Kind") == [Sample("y", 1)]
    assert read(path, columns="text=Note") == [Sample("x")], "it is named, messages are not"
    assert read(f"{path}:Note") == [Sample("x")]
    with pytest.raises(DataError, match="no column 'note' for text; it has Note, text, Kind, mess"):
        Records(path, "lm", columns="text=note")
    for wrong in ("body=x", "text", "text=", "text=a,text=b"):
        with pytest.raises(DataError, match="--columns"):
            parse_columns(wrong)


def test_records_are_checked_before_the_objective_is_known(tmp_path):
    """A wrong file costs no session with a parameter server."""
    rows = [{"text": "x", "label": "a"}, {"text": "y", "label": ""}, {"text": "", "label": "b"}]
    path = jsonl(tmp_path / "a.jsonl", rows)
    why = "1 without label (line 2), 1 without text (line 3)"
    assert check_records(str(path), "") == [
        "data a.jsonl: text (lm), 2 of 3 rows used; 1 without text (line 3)",
        "data a.jsonl: text + label (classify), 1 of 3 rows used; " + why,
    ]
    jsonl(path, [{"body": "x"}])
    with pytest.raises(
        DataError,
        match=r"holds body. lm needs .*; classify needs .*; dpo, simpo, orpo, reward need ",
    ):
        check_records(str(path), "")
    jsonl(path, [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(DataError, match="no row can be used: 1 without an assistant's message"):
        check_records(str(path), "")


@pytest.mark.skipif(not importlib.util.find_spec("datasets"), reason="needs the extra datasets")
def test_data_sets_are_read_as_pretraining_reads_them(tmp_path, monkeypatch):
    """Numbers of class labels become names: each site may have them in another order."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_OFFLINE", True)
    labels = datasets.ClassLabel(names=["positive", "negative"])
    features = datasets.Features({"text": datasets.Value("string"), "label": labels})
    data = datasets.Dataset.from_dict({"text": ["x", "y", "z"], "label": [0, 1, -1]}, features)
    data.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder" / "data").mkdir(parents=True)
    data.to_parquet(str(tmp_path / "folder" / "data" / "train-0.parquet"))
    hub = f"hf://{tmp_path / 'folder'}"
    for path in (tmp_path / "saved", tmp_path / "folder", hub):
        assert read(path, "classify") == [Sample("x", 1), Sample("y", 0)], path
        assert read(path, columns="text=text") == [Sample("x"), Sample("y"), Sample("z")]
    assert check_records(hub, "")[1].endswith("the first rows hold text + label")
    with pytest.raises(DataError, match="label 'positive' is not a label of the run"):
        read(tmp_path / "saved", "classify", ("bad", "good"))


@pytest.mark.skipif(not importlib.util.find_spec("pyarrow"), reason="needs the extra datasets")
def test_fields_that_arrow_adds_are_not_there(tmp_path):
    """All objects of a column have the same fields in Arrow, and templates test for their names."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    call = {"name": "add", "arguments": {"a": 2}}
    turns = [TURNS[0], {"role": "assistant", "content": None, "tool_calls": [{"function": call}]}]
    other = [{"function": {"name": "sub", "arguments": {"b": 3}}}]
    rows = [{"messages": turns}, {"messages": [*TURNS, {"role": "assistant", "tool_calls": other}]}]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = (sample.chats[0].turns for sample in read(tmp_path / "a.parquet"))
    assert second[:2] == tuple(TURNS)
    assert second[2]["tool_calls"][0]["function"] == other[0]["function"]
    assert first[1] == {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]}


@pytest.mark.parametrize(
    ("given", "known"), [(True, 1), (False, 0), (1, 1), (0.0, 0), ("good", 1), ("Down", 0)]
)
def test_completions_are_rated_good_or_bad(tmp_path, given, known):
    """As TRL has them for KTO; thumbs and words count too."""
    path = jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b", "label": given}])
    (found,) = Records(path, "kto")
    assert (found.prompt, found.completion, found.label) == ("a", "b", known)


def test_conversations_are_rated_and_other_labels_are_counted(tmp_path):
    asked, answer = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yes"}]
    row = {"prompt": asked, "completion": answer, "label": True}
    records = Records(jsonl(tmp_path / "a.jsonl", [row, {**row, "label": 3}]), "kto")
    (found,) = records
    assert found.label == 1
    assert [turn["content"] for turn in found.chats[0].turns] == ["hi", "yes"]
    assert str(records.skips) == "1 whose label is neither true nor false (line 2)"
