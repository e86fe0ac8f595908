"""A tiny tokenizer and texts whose words are numbered, so that what was trained can be counted."""

import json

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]
END = "<|endoftext|>"


def write_tokenizer(folder, words=1000, end=END):
    """A tokenizer of whole words: w0 ... w999 and some more; returns its file."""
    vocabulary = {"[UNK]": 0}
    for word in [*WORDS, *(f"w{number}" for number in range(words))]:
        vocabulary[word] = len(vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tokenizer.json"
    added = {"id": len(vocabulary), "content": end, "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    path.write_text(
        json.dumps(
            {
                "version": "1.0",
                "truncation": None,
                "padding": None,
                "added_tokens": [added | flags],
                "normalizer": None,
                "pre_tokenizer": {"type": "WhitespaceSplit"},
                "post_processor": None,
                "decoder": None,
                "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"},
            }
        )
    )
    return path


def texts(count, words=7):
    """Texts of so many words; text i is "w(i % 1000) alpha beta ..." with 0 to 3 words more."""
    return [
        " ".join([f"w{i % 1000}", *(WORDS[(i + k) % 8] for k in range(words + i % 4))])
        for i in range(count)
    ]


def write_parquet(folder, rows, *, files=2, group=50, column="text"):
    """Rows in Parquet files of several row groups; returns the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    size = -(-len(rows) // files)
    for file in range(files):
        part = rows[file * size : (file + 1) * size]
        table = pa.table({"id": list(range(len(part))), column: pa.array(part, pa.string())})
        pq.write_table(table, folder / f"part-{file}.parquet", row_group_size=group)
    return folder


def write_lines(path, rows, column="text"):
    """Rows as JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: row, "n": i}) + "\n" for i, row in enumerate(rows)))
    return path
