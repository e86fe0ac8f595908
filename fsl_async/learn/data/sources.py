"""What `--data` of the built-in pretraining names, and the texts there.

    FILE or FOLDER of text          a text each file
    FILE.jsonl, a folder of them    a text each line
    FILE.parquet, a folder of them  a text each row
    a folder of save_to_disk        a text each row
    hf://NAME[:CONFIG][:SPLIT][:COLUMN]    a text each row, streamed by `datasets.load_dataset`

PATH:COLUMN names the column of text of all but the first and the last.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs

from fsl_async.errors import DataError
from fsl_async.learn.data.base import extra
from fsl_async.learn.data.corpus import Corpus
from fsl_async.learn.data.documents import (
    Documents,
    JsonLines,
    ParquetRows,
    SavedRows,
    Source,
    Stream,
    TextFiles,
    stream_error,
)
from fsl_async.learn.data.hub import is_hub_folder

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
        return SavedRows(path, column, held_out)
    if location.kind == "text":
        if column:
            raise DataError(f"data {str(path)!r} is text, which has no column {column[:80]!r}")
        return TextFiles(Corpus.open(path, context=1, held_out=held_out), held_out)
    files = sorted(path.rglob(f"*.{location.kind}")) if path.is_dir() else [path]
    made: Callable[..., Documents] = ParquetRows if location.kind == "parquet" else JsonLines
    return made(str(path), files, column, held_out)


def open_source(location: Location, part: tuple[int, int], held_out: float) -> Source:
    """The texts of part `part[0]` of `part[1]`. Raises DataError."""
    if location.kind == "hub":
        return _stream(location, part, held_out)
    return open_documents(location, held_out).part(*part)


def load_stream(location: Location) -> Any:
    """Open a data set of `hf://` as an IterableDataset. Raises DataError."""
    name = _name(location)
    datasets = extra("datasets", f"data {name!r}")
    # With these the package loads files of a format; some have read pickles.
    loaders = extra("datasets.packaged_modules", f"data {name!r}")
    if location.path in getattr(loaders, "_PACKAGED_DATASETS_MODULES", ()):
        raise DataError(
            f"data {name[:200]!r} names a file format that datasets reads, not a data set: give"
            " hf://OWNER/NAME, or the path of your files"
        )
    try:
        return datasets.load_dataset(
            location.path, location.config or None, split=location.split, streaming=True
        )
    except Exception as error:  # noqa: BLE001 - the network's, the hub's, the file formats'
        raise stream_error(name, error) from None


def _stream(location: Location, part: tuple[int, int], held_out: float) -> Source:
    name = _name(location)
    distributed = extra("datasets.distributed", f"data {name!r}")
    whole = load_stream(location)
    try:
        mine = distributed.split_dataset_by_node(whole, rank=part[0], world_size=part[1])
    except Exception as error:  # noqa: BLE001
        raise stream_error(name, error) from None
    return Stream(name, mine, location.column, held_out)


def _name(location: Location) -> str:
    return f"{HUB}{location.path}:{location.config}:{location.split}:{location.column}".rstrip(":")
