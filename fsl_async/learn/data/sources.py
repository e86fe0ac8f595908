"""Texts one after another, of what `--data` of the built-in pretraining names.

    FILE or FOLDER of text          a text each file
    FILE.jsonl, a folder of them    a text each line
    FILE.parquet, a folder of them  a text each row
    a folder of save_to_disk        a text each row
    hf://NAME[:CONFIG][:SPLIT][:COLUMN]    a text each row, streamed by `datasets.load_dataset`

PATH:COLUMN names the column of text of all but the first and the last. Sources:

    Documents    files of text, lines of .jsonl files, rows of Parquet files or of a saved data set
    Stream       a column of strings of a data set that `datasets` streams (hf://)

Documents have a length in units (bytes, rows), of which clients get contiguous, disjoint parts, and
whose end is held out, as in `Corpus`. A stream's length is unknown: its client's part is made by
`split_dataset_by_node`, and the first texts of it are held out.

A position within a part is a number: of the unit, or of the text in a stream. Reading can begin at
any position that a piece had; in a stream that reads up to there again, unless `datasets` can skip
by a state that it gave before.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, Literal, Self

import attrs

from fsl_async.errors import DataError
from fsl_async.learn.data.corpus import Corpus, Span
from fsl_async.learn.data.dataset import cannot_read, extra, file_bytes, json_object
from fsl_async.learn.data.hub import is_hub_folder, saved_table

PIECE_BYTES = 1 << 16
"""A file of text is read in pieces of at most this size, cut after a line."""
MOST_LINE_BYTES = 256 << 20
ROWS_AT_ONCE = 256
HELD_OUT_TEXTS = 64
"""The first texts of a part of a stream, which are not trained on."""
COLUMNS = ("text", "content")
"""Columns that are read where none is named."""
STRINGS = frozenset({"string", "large_string", "string_view"})
"""Arrow's types of text."""


@attrs.frozen(slots=True)
class Piece:
    """A text, or a part of one. at: its position; ends: the text ends with it.

    resume: from where a stream goes on with this piece; None where `at` is enough.
    """

    text: str
    at: int
    ends: bool = True
    resume: Any = None


@attrs.frozen(slots=True, eq=False)
class Documents:
    """All texts of a source with a length, or one client's part of them.

    unit: what lengths count, in the plural. train, tail: the units to train on, and those that are
    held out. pieces: gives the pieces that begin in a span, in order. fingerprint: of the data, by
    names and sizes.
    """

    name: str
    fingerprint: str
    unit: str
    train: Span
    tail: Span
    pieces: Callable[[Span], Iterator[Piece]]

    def part(self, index: int, count: int) -> Self:
        """Part `index` of the `count` disjoint parts of what is trained on. Raises DataError."""
        start, stop = (self.train.stop * edge // count for edge in (index, index + 1))
        if stop <= start:
            raise DataError(
                f"data {self.name!r} has {self.train.stop} {self.unit} to train on, and {count}"
                " clients share them: give more text or fewer data.shards"
            )
        return attrs.evolve(self, train=Span(start, stop))

    def read(self, epoch: int, at: int, resume: Any = None) -> Iterator[Piece]:
        """The pieces of an epoch, from a position on. Raises DataError."""
        return self.pieces(Span(max(at, self.train.start), self.train.stop))

    def held_out(self) -> Iterator[str]:
        """Texts that are never trained on, at the end; none where nothing is held out."""
        if self.tail.bytes:
            yield from (one.text for one in self.pieces(self.tail))


def _documents(
    name: str,
    size: int,
    unit: str,
    *,
    held_out: float,
    named: str,
    pieces: Callable[[Span], Iterator[Piece]],
) -> Documents:
    """Divide `size` units. named: what tells these data from others.

    Raises DataError for fewer than two units, or for none without a held-out part.
    """
    tail = max(1, int(size * held_out)) if held_out else 0
    if size <= tail:
        raise DataError(f"data {name!r} holds {size} {unit}: give more text")
    train = size - tail
    digest = sha256(named.encode(errors="surrogateescape")).hexdigest()[:32]
    return Documents(name, digest, unit, Span(0, train), Span(train, size), pieces)


_Read = Callable[[IO[bytes], Path, Span], Iterator[tuple[str, int, bool]]]
"""Texts of a file that begin in a span of it, their positions, and whether they end."""


def _files(name: str, files: Sequence[tuple[Path, int]], held_out: float, read: _Read) -> Documents:
    """Bytes of files and their sizes, one file after another."""

    def pieces(span: Span) -> Iterator[Piece]:
        end = 0
        for path, size in files:
            begin, end = end, end + size
            if end <= span.start or begin >= span.stop:
                continue
            if file_bytes(path) != size:
                raise DataError(
                    f"{str(path)!r} has changed since it was indexed: do not change data during a"
                    " run; restart"
                )
            here = Span(max(0, span.start - begin), min(size, span.stop - begin))
            try:
                with path.open("rb") as stream:
                    for text, at, ends in read(stream, path, here):
                        yield Piece(text, begin + at, ends)
            except OSError as error:
                raise cannot_read(path, error) from error

    named = "".join(f"{path.name}\0{size}\n" for path, size in files)
    total = sum(size for _, size in files)
    return _documents(name, total, "bytes", held_out=held_out, named=named, pieces=pieces)


def text_files(corpus: Corpus, held_out: float) -> Documents:
    """The files of a corpus; a text that two parts share is cut between them."""
    root = corpus.root
    files = [(root / name if root.is_dir() else root, size) for name, size in corpus.files]

    def read(stream: IO[bytes], _: Path, span: Span) -> Iterator[tuple[str, int, bool]]:
        at = span.start
        while at < span.stop:
            stream.seek(at)
            data = stream.read(min(PIECE_BYTES, span.stop - at))
            if not data:
                return
            if at + len(data) < span.stop:
                data = data[: data.rfind(b"\n") + 1 or _complete_characters(data)]
            # A character that two parts share is in neither.
            yield data.decode(errors="ignore"), at, at + len(data) == span.stop
            at += len(data)

    return _files(str(root), files, held_out, read)


def _complete_characters(data: bytes) -> int:
    """Bytes of `data` without a last character that is cut."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            break
        if byte >= 0xC0:
            return len(data) - back or len(data)
    return len(data)


def json_lines(name: str, files: Sequence[Path], column: str, held_out: float) -> Documents:
    """A string of each line; a line belongs to the part in which it begins."""
    sizes = [(path, file_bytes(path)) for path in files]
    if not column:
        with files[0].open("rb") as stream:
            first = next((_object(line, files[0], 0) for line in stream if line.strip()), {})
        column = chosen_column(name, list(first), "")

    def read(stream: IO[bytes], path: Path, span: Span) -> Iterator[tuple[str, int, bool]]:
        at = span.start
        if at:
            stream.seek(at - 1)
            at += len(stream.readline(MOST_LINE_BYTES)) - 1
        while at < span.stop:
            line = stream.readline(MOST_LINE_BYTES)
            if not line:
                return
            if line.strip():
                found = _object(line, path, at)
                text = found.get(column)
                if not isinstance(text, str):
                    raise DataError(
                        f"{str(path)!r}, byte {at}: no text in {column[:80]!r}; its names:"
                        f" {', '.join(found)[:200]}"
                    )
                yield text, at, True
            at += len(line)

    return _files(name, sizes, held_out, read)


def _object(line: bytes, path: Path, at: int) -> dict[str, Any]:
    found = json_object(line)
    if found is None:
        raise DataError(f"{str(path)!r}, byte {at}: this line is no object of JSON")
    return found


def _rows(
    name: str,
    size: int,
    held_out: float,
    named: str,
    texts: Callable[[int, int], Iterator[str | None]],
) -> Documents:
    """A column of strings. texts: gives those of rows."""

    def pieces(span: Span) -> Iterator[Piece]:
        for row, text in enumerate(texts(span.start, span.stop), span.start):
            yield Piece(text or "", row)

    return _documents(name, size, "rows", held_out=held_out, named=named, pieces=pieces)


def open_parquet(path: Path) -> Any:
    """Open a pyarrow.parquet.ParquetFile. Raises DataError."""
    parquet = extra("pyarrow.parquet", f"data {str(path)!r}")
    try:
        return parquet.ParquetFile(str(path))
    except Exception as error:  # noqa: BLE001 - pyarrow raises several kinds
        raise DataError(f"cannot read data {str(path)!r} ({error})") from None


def parquet_rows(name: str, files: Sequence[Path], column: str, held_out: float) -> Documents:
    """A column of Parquet files. Needs pyarrow."""
    groups: list[tuple[Path, int]] = []
    sizes = []
    for path in files:
        with open_parquet(path) as found:
            strings = [one.name for one in found.schema_arrow if str(one.type) in STRINGS]
            column = chosen_column(str(path), strings, column)
            for group in range(found.metadata.num_row_groups):
                groups.append((path, group))
                sizes.append(found.metadata.row_group(group).num_rows)
    starts = [0, *accumulate(sizes)]

    def texts(start: int, stop: int) -> Iterator[str | None]:
        group = max(0, bisect_right(starts, start) - 1)
        while group < len(groups) and starts[group] < stop:
            path, index = groups[group]
            at = starts[group]
            with open_parquet(path) as found:
                for batch in found.iter_batches(ROWS_AT_ONCE, [index], [column]):
                    first, last = max(0, start - at), min(len(batch), stop - at)
                    if first < last:
                        yield from batch.column(0).slice(first, last - first).to_pylist()
                    at += len(batch)
            group += 1

    named = json.dumps([[path.name for path in files], starts, column])
    return _rows(name, starts[-1], held_out, named, texts)


def saved_rows(folder: Path, column: str, held_out: float) -> Documents:
    """A column of a folder that save_to_disk wrote. Needs pyarrow."""
    table, _ = saved_table(folder)
    strings = [one.name for one in table.schema if str(one.type) in STRINGS]
    values = table.column(chosen_column(str(folder), strings, column))

    def texts(start: int, stop: int) -> Iterator[str | None]:
        for first in range(start, stop, ROWS_AT_ONCE):
            yield from values.slice(first, min(ROWS_AT_ONCE, stop - first)).to_pylist()

    size, lengths = len(values), [len(chunk) for chunk in values.chunks]
    return _rows(str(folder), size, held_out, json.dumps([size, lengths]), texts)


class Stream:
    """A client's part of a data set that `datasets` streams.

    data: an IterableDataset of this part. fingerprint: of its name and part.
    """

    def __init__(self, name: str, data: Any, column: str, held_out: float) -> None:
        self.name = name
        try:
            known = data.column_names or list(next(iter(data), ()))
            self._column = chosen_column(name, known, column)
            self._data = data
            first = islice(iter(self._begun(0)), HELD_OUT_TEXTS if held_out else 0)
            self._first = [self._text(row, at) for at, row in enumerate(first)]
        except Exception as error:  # noqa: BLE001 - the network's, the file formats'
            raise stream_error(name, error) from None
        self.fingerprint = sha256(f"{name}\0{self._column}".encode()).hexdigest()[:32]

    def read(self, epoch: int, at: int, resume: Any = None) -> Iterator[Piece]:
        """As of `Documents`. Without `resume` the texts before `at` are read again."""
        at = max(at, len(self._first))
        try:
            data = self._begun(epoch)
            if resume is not None:
                data.load_state_dict(resume)
            rows = iter(data)
            for _ in islice(rows, 0 if resume is not None else at):
                pass
            while True:
                state = data.state_dict()
                row = next(rows, None)
                if row is None:
                    return
                yield Piece(self._text(row, at), at, resume=state)
                at += 1
        except Exception as error:  # noqa: BLE001
            raise stream_error(self.name, error) from None

    def held_out(self) -> Iterator[str]:
        """The first texts, read when the stream was opened."""
        yield from self._first

    def _begun(self, epoch: int) -> Any:
        """The data from their beginning: an object of its own, because it has a state."""
        data = self._data.select_columns([self._column])
        data.set_epoch(epoch)
        return data

    def _text(self, row: dict[str, Any], at: int) -> str:
        text = row[self._column]
        if not isinstance(text, str | None):
            raise DataError(
                f"data {self.name!r}, text {at}: column {self._column!r} holds"
                f" {type(text).__name__}: name a column of text"
            )
        return text or ""


Source = Documents | Stream
"""The texts of one client's part."""


def stream_error(name: str, error: Exception) -> DataError:
    """An error that names the data and the reason, in one line."""
    if isinstance(error, DataError):
        return error
    reason = " ".join(str(error).split())[:300]
    return DataError(f"data {name!r} cannot be read ({type(error).__name__}: {reason})")


def chosen_column(name: str, names: Sequence[str], column: str) -> str:
    """The column that is named, or the first usual one; else DataError with those there are."""
    found = column or next((one for one in COLUMNS if one in names), "")
    if found in names:
        return found
    what = f"no column {column[:80]!r} of text" if column else "no column text"
    there = ", ".join(names)[:200] or "none"
    raise DataError(f"data {name!r} has {what}: name one with :COLUMN (columns: {there})")


HUB = "hf://"
FORM = "hf://NAME[:CONFIG][:SPLIT][:COLUMN]"
DEFAULT_SPLIT = "train"

Kind = Literal["text", "jsonl", "parquet", "saved", "hub"]


@attrs.frozen(slots=True)
class Location:
    """Where texts are. column: empty: a usual one. config, split: of `hf://`."""

    kind: Kind
    path: str
    column: str = ""
    config: str = ""
    split: str = DEFAULT_SPLIT

    @property
    def name(self) -> str:
        """How `--data` names a data set of the hub."""
        return f"{HUB}{self.path}:{self.config}:{self.split}:{self.column}".rstrip(":")


def is_streamed(data: str) -> bool:
    """Whether `data` names a data set for `datasets.load_dataset`, not a path."""
    return data.startswith(HUB)


def location_of(data: str) -> Location:
    """Parse `data`, and look what is at the path. Raises DataError for hf:// without a name."""
    if is_streamed(data):
        name, *more = data.removeprefix(HUB).split(":")
        if not name or len(more) > 3:
            raise DataError(f"data {data[:200]!r}: write it as {FORM}")
        config, split, column = (*more, "", "", "")[:3]
        return Location("hub", name, column, config, split or DEFAULT_SPLIT)
    path, column = split_column(data)
    return Location(_kind(Path(path)), path, column)


def split_column(data: str) -> tuple[str, str]:
    """PATH and COLUMN of PATH:COLUMN; a path that exists has no column."""
    path, colon, column = data.rpartition(":")
    if colon and path and not Path(data).expanduser().exists():
        return path, column
    return data, ""


def _kind(path: Path) -> Kind:
    path = path.expanduser()
    if not path.is_dir():
        kinds: dict[str, Kind] = {".jsonl": "jsonl", ".parquet": "parquet"}
        return kinds.get(path.suffix, "text")
    if is_hub_folder(path):
        return "saved"
    if next(path.rglob("*.parquet"), None) is not None:
        return "parquet"
    files = [one for one in path.iterdir() if not one.name.startswith(".")]
    return "jsonl" if files and all(one.suffix == ".jsonl" for one in files) else "text"


def open_documents(location: Location, held_out: float) -> Documents:
    """Open what is on disk. held_out: the share at its end. Raises DataError."""
    path, column = Path(location.path).expanduser(), location.column
    if not path.exists():
        raise DataError(f"cannot read data {str(path)!r} (no such file or directory)")
    if location.kind == "saved":
        return saved_rows(path, column, held_out)
    if location.kind == "text":
        if column:
            raise DataError(f"data {str(path)!r} is text, which has no column {column[:80]!r}")
        return text_files(Corpus.open(path, context=1, held_out=held_out), held_out)
    files = sorted(path.rglob(f"*.{location.kind}")) if path.is_dir() else [path]
    opened = parquet_rows if location.kind == "parquet" else json_lines
    return opened(str(path), files, column, held_out)


def open_source(location: Location, part: tuple[int, int], held_out: float) -> Source:
    """The texts of part `part[0]` of `part[1]`. Raises DataError."""
    if location.kind != "hub":
        return open_documents(location, held_out).part(*part)
    distributed = extra("datasets.distributed", f"data {location.name!r}")
    stream = load_stream(location)
    try:
        mine = distributed.split_dataset_by_node(stream, rank=part[0], world_size=part[1])
    except Exception as error:  # noqa: BLE001
        raise stream_error(location.name, error) from None
    return Stream(location.name, mine, location.column, held_out)


def load_stream(location: Location) -> Any:
    """Open a data set of `hf://` as an IterableDataset. Raises DataError."""
    datasets = extra("datasets", f"data {location.name!r}")
    # With these the package loads files of a format; some have read pickles.
    loaders = extra("datasets.packaged_modules", f"data {location.name!r}")
    if location.path in getattr(loaders, "_PACKAGED_DATASETS_MODULES", ()):
        raise DataError(
            f"data {location.name[:200]!r} names a file format that datasets reads, not a data set:"
            " give hf://OWNER/NAME, or the path of your files"
        )
    try:
        return datasets.load_dataset(
            location.path, location.config or None, split=location.split, streaming=True
        )
    except Exception as error:  # noqa: BLE001 - the network's, the hub's, the file formats'
        raise stream_error(location.name, error) from None
