"""Data of `demo lora`: English from the standard library, cut into records and dealt to sites.

The texts are `pydoc_data.topics`, what `help("assert")` shows: 79 topics, half a megabyte. Each
site gets whole topics, and neighbors in subject go to one site, so what a site has tells it little
about the others' texts. The last part of each site's records is held out from training everywhere.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from fsl_async.errors import DataError
from fsl_async.files.private_files import make_folder

RECORD_CHARACTERS = 320
"""A record is as many whole paragraphs as fit, and at least one."""
HELD_OUT_SHARE = 0.1
TRAIN_FILE, TEST_FILE = "train.jsonl", "test.jsonl"

_WORD = re.compile(r"[a-z]{3,}")
_BLANK_LINES = re.compile(r"\n\s*\n")
_COMMON = 3
"""A word counts for a topic's subject when at least so many topics have it."""


def python_topics() -> dict[str, str]:
    """The texts by topic. Raises DataError where this Python lacks them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python has no pydoc_data.topics, the English that the demo trains on: give"
            " texts of your own with --data FILE.jsonl, once for each client"
        ) from None
    return dict(topics)


def records_of(text: str, characters: int = RECORD_CHARACTERS) -> list[str]:
    """Cut a text at blank lines into records of about so many characters."""
    found: list[str] = []
    for paragraph in filter(None, map(str.strip, _BLANK_LINES.split(text))):
        if found and len(found[-1]) + len(paragraph) + 2 <= characters:
            found[-1] += f"\n\n{paragraph}"
        else:
            found.append(paragraph)
    return found


def by_subject(topics: Mapping[str, str]) -> list[str]:
    """Names of topics in an order in which neighbors use the same words.

    By the first principal component of the words' frequencies, which are square roots of shares
    within a topic.
    """
    names = sorted(topics)
    words = [Counter(_WORD.findall(topics[name].lower())) for name in names]
    topics_with = Counter(word for found in words for word in found)
    known = sorted(word for word, count in topics_with.items() if count >= _COMMON)
    if not known:
        return names
    table = np.array([[float(found[word]) for word in known] for found in words])
    table = np.sqrt(table / np.maximum(1, table.sum(1, keepdims=True)))
    table -= table.mean(0)
    first = np.linalg.svd(table, full_matrices=False)[0][:, 0]
    # A component's sign is arbitrary.
    first *= np.sign(first[np.abs(first).argmax()]) or 1.0
    return [names[place] for place in np.argsort(first, kind="stable")]


def dealt(topics: Mapping[str, str], sites: int) -> list[list[str]]:
    """Names of the topics of each site: a run of `by_subject`, about as much text for each.

    Raises DataError where there are fewer topics than sites.
    """
    if len(topics) < sites:
        raise DataError(f"{len(topics)} topics cannot be dealt to {sites} clients")
    order = by_subject(topics)
    ends = np.cumsum([len(topics[name]) for name in order])
    cuts = [0]
    for site in range(1, sites):
        nearest = int(np.abs(ends - ends[-1] * site / sites).argmin()) + 1
        # Each site gets at least one.
        cuts.append(min(max(nearest, cuts[-1] + 1), len(order) - (sites - site)))
    return [order[start:stop] for start, stop in pairwise([*cuts, len(order)])]


def held_out(records: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a site's records into those to train on and those to test with.

    Every so-manieth is held out, so both parts are of all its texts. Raises DataError where there
    are fewer than two.
    """
    if len(records) < 2:
        raise DataError("a client needs at least two records: one to train on, one to test with")
    every = min(round(1 / HELD_OUT_SHARE), len(records))
    tested = set(range(every - 1, len(records), every))
    return (
        [record for place, record in enumerate(records) if place not in tested],
        [records[place] for place in sorted(tested)],
    )


def topic_records(sites: int) -> list[tuple[list[str], list[str]]]:
    """Deal Python's topics to sites: lines of JSON to train on, and to test with, of each."""
    topics = python_topics()
    return [
        held_out(
            [json.dumps({"text": record}) for topic in mine for record in records_of(topics[topic])]
        )
        for mine in dealt(topics, sites)
    ]


def own_records(path: Path) -> tuple[list[str], list[str]]:
    """The same of a jsonl file of the user's, for one site. Raises DataError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"data {str(path)!r} cannot be read: {error}") from None
    try:
        return held_out([line for line in text.splitlines() if line.strip()])
    except DataError as error:
        raise DataError(f"data {str(path)!r}: {error.message}") from None


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines of text, in a folder that is made."""
    make_folder(path.parent)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
