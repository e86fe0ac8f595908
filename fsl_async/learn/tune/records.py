"""Makes samples for fine-tuning of the rows of files and data sets. No torch, no NumPy.

    labeled       text and label                                  (classify)
    chat          messages, perhaps with tools                    (lm)
    completion    a prompt and its completion                     (lm)
    text          text alone                                      (lm)
    preference    a prompt, the chosen and the rejected answer    (dpo, simpo, orpo, reward)
    rated         a prompt, a completion and whether it is good   (kto)
    prompt        a prompt, which the model answers itself        (grpo)

The first rows of each file decide which of them it holds, among those of the objective. A row that
does not fit is skipped, and counted by its reason. `fsl_async.learn.tune.rows` reads the files,
`fsl_async.learn.tune.templates` the messages.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any, get_args

import attrs

from fsl_async.config.settings_tuning import Objective
from fsl_async.errors import DataError, one_line
from fsl_async.learn.data.sources import location_of
from fsl_async.learn.tune.rows import Numbered, Rows, open_rows
from fsl_async.learn.tune.templates import (
    Chat,
    UnfitError,
    Weighed,
    chat_of,
    text_turn,
    tools_of,
    turns_of,
)

FIRST_ROWS = 20
"""Rows that decide what a file holds."""
SHOWN_LINES = 3
SHOWN_REASONS = 6

_KNOWN: Mapping[str, tuple[str, ...]] = {
    "text": ("text", "sentence", "content", "review", "document"),
    "label": ("label", "target", "class", "category", "sentiment", "labels", "good"),
    "prompt": ("prompt", "instruction", "question", "query", "input"),
    "input": ("input",),
    "completion": ("completion", "response", "output", "answer"),
    "messages": ("messages", "conversations", "conversation"),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "tools": ("tools", "functions"),
    "system": ("system",),
}
"""Names of columns that are recognized, in any case, the usual one first."""
NAMED = ("text", "label", "prompt", "completion", "messages", "tools", "chosen", "rejected")
"""Names that `--columns` takes."""

PAIRS: tuple[Objective, ...] = ("dpo", "simpo", "orpo", "reward")
"""Objectives of preferences between two answers."""
GOOD = ("bad", "good")
"""Names of the labels of kto, by number."""
_SHAPES: Mapping[Objective, Mapping[str, tuple[str, ...]]] = {
    "lm": {
        "chat": ("messages", "tools?", "system?"),
        "completion": ("prompt", "input?", "completion", "tools?"),
        "text": ("text",),
    },
    "classify": {"labeled": ("text", "label")},
    "kto": {"rated": ("prompt", "input?", "completion", "label", "tools?")},
    "grpo": {"prompt": ("prompt", "input?")},
    **{one: {"preference": ("prompt?", "chosen", "rejected", "tools?")} for one in PAIRS},
}
"""Shapes of each objective, the preferred one first, with their parts; ? marks optional ones."""
_NEEDED: Mapping[Objective, str] = {
    "lm": "messages, prompt and completion, or text",
    "classify": "text and label",
    "kto": "prompt, completion and label (true or false)",
    "grpo": "prompt",
    **dict.fromkeys(PAIRS, "prompt, chosen and rejected"),
}
_NO_OBJECT = "that are no JSON object"
_TRUTH = {"false": 0, "true": 1}
_RATED = {"0": 0, "1": 1, "bad": 0, "good": 1, "down": 0, "up": 1, "no": 0, "yes": 1} | _TRUTH

Row = Mapping[str, Any]


@attrs.frozen(slots=True)
class Sample:
    """A row. Its shape decides which fields it has.

    label: of classify its number; of kto 1 where the completion is good, else 0.
    chats: one, or of a preference two: with the chosen and with the rejected answer.
    row: of a prompt to be answered: the columns of its row, for the reward function.
    """

    text: str = ""
    label: int = -1
    prompt: str = ""
    completion: str = ""
    rejected: str = ""
    chats: tuple[Chat, ...] = ()
    row: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(slots=True)
class Columns:
    """The shape of a file's rows, and the column of each part."""

    shape: str
    at: Mapping[str, str]

    @property
    def described(self) -> str:
        """The columns, like "prompt + completion"."""
        return " + ".join(self.at.values())


def parse_columns(text: str) -> dict[str, str]:
    """Parse `--columns`, "text=TEXT,label=Label". Raises DataError."""
    found: dict[str, str] = {}
    for each in filter(None, text.split(",")):
        name, equals, column = (part.strip() for part in each.partition("="))
        if name not in NAMED or not equals or not column:
            raise DataError(
                f"--columns {each.strip()[:80]!r}: write NAME=COLUMN, with a NAME of"
                f" {', '.join(NAMED)}"
            )
        if name in found:
            raise DataError(f"--columns names {name} twice")
        found[name] = column
    return found


class NoColumnsError(DataError):
    """Columns that an objective needs are missing. held: a sentence on those that are there."""

    def __init__(self, message: str, held: str) -> None:
        super().__init__(message)
        self.held = held


class Skips:
    """Rows that were not used, by reason, each with the first of their places."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}
        self._counts = Counter[str]()

    def add(self, reason: str, place: str = "") -> None:
        """Count a row. place: its line, like "line 17"."""
        self._counts[reason] += 1
        places = self._found.setdefault(reason, [])
        if place and len(places) <= SHOWN_LINES:
            places.append(place)

    @property
    def total(self) -> int:
        """Number of rows counted."""
        return self._counts.total()

    def __str__(self) -> str:
        """Return "4 without text (line 3, line 5), 1 with a stray quote (line 17)"."""
        shown = self._counts.most_common(SHOWN_REASONS)
        parts = [self._described(reason) for reason, _ in shown]
        rest = self.total - sum(count for _, count in shown)
        return one_line(", ".join([*parts, *([f"{rest:,} for other reasons"] if rest else [])]))

    def _described(self, reason: str) -> str:
        places = self._found[reason]
        more = ", ..." if len(places) > SHOWN_LINES else ""
        shown = f" ({', '.join(places[:SHOWN_LINES])}{more})" if places else ""
        return f"{self._counts[reason]:,} {reason}{shown}"


class Records:
    """The samples of a file, folder or data set, streamed at each iteration.

    data: as of `--data`; a column behind a path, or of hf://, is that of the text.
    labels: of classify: their names, in the order of their numbers; None: any label is taken.
    columns: as of `--columns`; others are found by their usual names.

    After an iteration: rows, the number of samples; skips, the rows that did not fit.

    Raises DataError, in one line with file and line: nothing to read, no columns of the objective,
    damage that ends a file, an unknown label, no sample at all.
    """

    def __init__(
        self,
        data: str | Path,
        objective: Objective,
        labels: Sequence[str] | None = (),
        *,
        columns: str = "",
    ) -> None:
        location = location_of(str(data))
        self.path = str(data)
        self.name = Path(location.path).name or location.path
        self.is_streamed = location.kind == "hub"
        self._objective = objective
        self._labels = None if labels is None else {name: n for n, name in enumerate(labels)}
        named = {"text": location.column} if location.column else {}
        self._named = named | parse_columns(columns)
        self._files = open_rows(location)
        self.rows, self.skips = 0, Skips()
        # A file without the right columns is an error before the model is loaded.
        self.columns = self._open(self._files[0])[0]

    def __iter__(self) -> Iterator[Sample]:
        """All samples, in the order of files and rows."""
        yield from self._samples()
        if not self.rows:
            raise DataError(f"data {self.path!r}: no row can be used: {self.skips}")

    def count(self) -> None:
        """Read all rows, for `rows` and `skips` alone."""
        for _ in self._samples():
            pass

    def _samples(self) -> Iterator[Sample]:
        self.rows, self.skips = 0, Skips()
        for file in self._files:
            columns, rows = self._open(file)
            if columns.shape != self.columns.shape:
                raise DataError(
                    f"{file.path!r} holds {columns.described}, and {self._files[0].name!r}"
                    f" {self.columns.described}: keep files of one kind in a folder"
                )
            for number, row in rows:
                sample = self._sample(file, number, row, columns)
                if sample is not None:
                    self.rows += 1
                    yield sample

    @property
    def used(self) -> str:
        """How many rows were samples, and why others were not; after an iteration."""
        return used_line(self.rows, self.rows + self.skips.total, str(self.skips))

    def _open(self, file: Rows) -> tuple[Columns, Numbered]:
        rows = file.read()
        first = list(islice(rows, FIRST_ROWS))
        if not first:
            raise DataError(f"{file.path!r} holds no rows")
        found = recognize(file.path, [row for _, row in first], self._objective, self._named)
        return found, chain(first, rows)

    def _sample(self, file: Rows, number: int, row: Any, columns: Columns) -> Sample | None:
        place = f"{file.unit} {number:,}"
        try:
            return self._read(row, columns)
        except UnfitError as error:
            self.skips.add(str(error), place if len(self._files) == 1 else f"{file.name} {place}")
            return None
        except DataError as error:
            raise DataError(f"{file.path!r}, {place}: {error.message}") from None

    def _read(self, row: Any, columns: Columns) -> Sample:
        if isinstance(row, UnfitError):
            raise row
        if not isinstance(row, Mapping):
            raise UnfitError(_NO_OBJECT)
        whole = row
        # By the names of the parts from here on.
        row = {part: row.get(column) for part, column in columns.at.items()}
        if columns.shape == "labeled":
            text = _text(row, "text")
            return Sample(text=text, label=self._label(row["label"], columns.at["label"]))
        if columns.shape == "text":
            return Sample(text=_text(row, "text"))
        if columns.shape == "chat":
            turns = turns_of(row["messages"], "messages")
            if row.get("system") and turns[0][0]["role"] != "system":
                turns = [text_turn("system", _text(row, "system")), *turns]
            return Sample(chats=(chat_of(turns, tools_of(row.get("tools"))),))
        if columns.shape == "prompt":
            return attrs.evolve(_prompt(row), row=dict(whole))
        if columns.shape == "rated":
            return attrs.evolve(_completion(row), label=_rating(row["label"]))
        return _completion(row) if columns.shape == "completion" else _preference(row)

    def _label(self, value: Any, column: str) -> int:
        """Return a label's number; it is given by name or number. Raises DataError if unknown."""
        is_nan = isinstance(value, float) and math.isnan(value)
        name = "" if value is None or is_nan else str(value).strip()
        if not name:
            raise UnfitError("without label")
        if self._labels is None:
            return 0
        whole, _, rest = name.partition(".")
        number = whole if whole.isascii() and whole.isdigit() and not rest.strip("0") else ""
        for known in (name, number, name.lower()):
            if known in self._labels:
                return self._labels[known]
        # Labels that are named by numbers are not numbered as well.
        if not any(known.isdigit() for known in self._labels):
            if number and len(number) < 10 and int(number) < len(self._labels):
                return int(number)
            if len(self._labels) == 2 and name.lower() in _TRUTH:
                return _TRUTH[name.lower()]
        raise DataError(
            f"{column} {name[:80]!r} is not a label of the run (tune.labels):"
            f" {', '.join(self._labels)}, or 0 to {len(self._labels) - 1}"
        )


def used_line(used: int, total: int, reasons: str) -> str:
    """Return "1,204 of 1,210 rows used; 6 without text"."""
    return f"{used:,} of {total:,} rows used" + (f"; {reasons}" if reasons else "")


def check_records(data: str, columns: str) -> list[str]:
    """Read all records once, before a run and its objective are known.

    Returns a line for each objective that they fit. Of hf:// only the first rows are read.
    Raises DataError where they fit none.
    """
    fitting: list[tuple[str, Records]] = []
    held = ""
    alike: dict[str, list[Objective]] = {}
    for objective in get_args(Objective):
        alike.setdefault(_NEEDED[objective], []).append(objective)
    for objectives in alike.values():
        try:
            found = Records(data, objectives[0], None, columns=columns)
            fitting.append((", ".join(objectives), found))
        except NoColumnsError as error:
            held = error.held
    if not fitting:
        needed = "; ".join(
            f"{', '.join(of)} need{'s' * (len(of) == 1)} {parts}" for parts, of in alike.items()
        )
        raise DataError(f"{held}. {needed}: {_RENAME}")
    first = fitting[0][1]
    if first.is_streamed:
        return [f"data {data}: the first rows hold {one.columns.described}" for _, one in fitting]
    for _, one in fitting:
        one.count()
    if not any(one.rows for _, one in fitting):
        raise DataError(f"data {data!r}: no row can be used: {first.skips}")
    return [
        f"data {one.name}: {one.columns.described} ({objective}), {one.used}"
        for objective, one in fitting
    ]


def recognize(
    path: str, rows: Sequence[Any], objective: Objective, named: dict[str, str]
) -> Columns:
    """Find out what a file holds, from its first rows.

    named: columns that the user names, by part. Others count where a row has a value in them.
    Raises DataError where a named column is missing, NoColumnsError where needed ones are.
    """
    objects = [row for row in rows if isinstance(row, Mapping)]
    if not objects:
        reason = next((str(row) for row in rows if isinstance(row, UnfitError)), _NO_OBJECT)
        raise DataError(f"{path!r}: no row can be used: the first are rows {reason}")
    there = dict.fromkeys(name for row in objects for name in row)
    filled = {name for row in objects for name, value in row.items() if value not in (None, "")}
    names = [str(name) if name in filled else f"{name} (empty)" for name in there]
    shown = one_line(", ".join(names)[:300])
    for part, column in named.items():
        if column not in there:
            raise DataError(f"{path!r} has no column {column[:80]!r} for {part}; it has {shown}")
    usual = {str(name).lower(): name for name in sorted(filled, reverse=True)}
    at = {
        part: next((usual[one] for one in known if one in usual), "")
        for part, known in _KNOWN.items()
    } | named
    if at["prompt"].lower() != "instruction":
        at["input"] = ""
    shapes = list(_SHAPES[objective].items())
    # Shapes with columns that the user names come first.
    shapes.sort(key=lambda shape: -len(set(shape[1]) & set(named)))
    for shape, parts in shapes:
        found = {part.rstrip("?"): at[part.rstrip("?")] for part in parts}
        if all(found[part] for part in parts if not part.endswith("?")):
            return Columns(shape, {part: column for part, column in found.items() if column})
    held = f"{path!r} holds {shown}"
    raise NoColumnsError(f"{held}, and {objective} needs {_NEEDED[objective]}: {_RENAME}", held)


_RENAME = "name its columns, like --columns text=BODY,label=KIND"


def _completion(row: Row) -> Sample:
    """Read a prompt and its completion, texts or messages."""
    texts = (_text(row, part, may_be_empty=True) for part in ("prompt", "input"))
    asked = row["prompt"]
    if not isinstance(asked, list):
        asked = "\n\n".join(filter(None, texts))
    tools = tools_of(row.get("tools"))
    if not (tools or isinstance(asked, list) or isinstance(row["completion"], list)):
        return Sample(prompt=asked, completion=_text(row, "completion"))
    before = turns_of(asked, "prompt") if isinstance(asked, list) else [text_turn("user", asked)]
    turns = [*before, *_turns(row, "completion", "assistant")]
    return Sample(chats=(chat_of(turns, tools, start=len(before)),))


def _prompt(row: Row) -> Sample:
    """Read a prompt, a text or messages, which is to be answered."""
    if isinstance(row["prompt"], list):
        turns = tuple(turn for turn, _ in turns_of(row["prompt"], "prompt"))
        return Sample(chats=(Chat(turns, ()),))
    texts = (_text(row, part, may_be_empty=part == "input") for part in ("prompt", "input"))
    return Sample(prompt="\n\n".join(filter(None, texts)))


def _rating(value: Any) -> int:
    name = "" if value is None else str(value).strip().lower().removesuffix(".0")
    if name not in _RATED:
        raise UnfitError("whose label is neither true nor false" if name else "without label")
    return _RATED[name]


def _preference(row: Row) -> Sample:
    """Read a prompt and two answers, which may both begin with the prompt's messages."""
    prompt, tools = row.get("prompt"), tools_of(row.get("tools"))
    if not (tools or any(isinstance(row.get(part), list) for part in _PREFERENCE)):
        chosen, rejected = _text(row, "chosen"), _text(row, "rejected")
        if chosen == rejected:
            raise UnfitError(_EQUAL)
        prompt = _text(row, "prompt", may_be_empty=True)
        return Sample(prompt=prompt, completion=chosen, rejected=rejected)
    answers = [list(_turns(row, part, "assistant")) for part in ("chosen", "rejected")]
    for part, turns in zip(("chosen", "rejected"), answers, strict=True):
        if turns[-1][0]["role"] != "assistant":
            raise UnfitError(f"whose {part} does not end with the assistant's message")
    if answers[0] == answers[1]:
        raise UnfitError(_EQUAL)
    pairs = enumerate(zip(answers[0][:-1], answers[1][:-1], strict=False))
    same = next((n for n, (one, other) in pairs if one != other), min(map(len, answers)) - 1)
    before = answers[0][:same]
    if isinstance(prompt, list) or not same:
        before = list(_turns(row, "prompt", "user"))
    whole = [one if one[: len(before)] == before else [*before, *one] for one in answers]
    return Sample(chats=tuple(chat_of(one, tools, start=len(before)) for one in whole))


_PREFERENCE = ("prompt", "chosen", "rejected")
_EQUAL = "with equal chosen and rejected"


def _turns(row: Row, part: str, role: str) -> Weighed:
    """Read messages, or a text as one message of a role."""
    if isinstance(row.get(part), list):
        return turns_of(row[part], part)
    return [text_turn(role, _text(row, part, may_be_empty=role == "user"))]


def _text(row: Row, part: str, *, may_be_empty: bool = False) -> str:
    value = row.get(part)
    if isinstance(value, float | int) and not isinstance(value, bool):
        value = "" if math.isnan(value) else str(value)
    value = "" if value is None else value
    if not isinstance(value, str):
        raise UnfitError(f"whose {part} is no text")
    if not (may_be_empty or value.strip()):
        raise UnfitError(f"without {part}")
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can hold half a character, like \ud800, which no tokenizer takes.
        raise UnfitError("with half a character") from None
    return value
