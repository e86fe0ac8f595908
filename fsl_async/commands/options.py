"""Declares options as fields of one object, their types, and the words that a shell completes.

    class StatusOptions(Options):
        run_dir: Path = argument(RunDir())
        follow: bool = option("Go on until the run ends, or Ctrl-C.")

    @click.command("status")
    @takes(StatusOptions)
    def command(options: StatusOptions) -> int: ...

The name of an option is that of its field, and its annotation decides whether it is a flag, may be
given several times, or is a path. attrs would double the time of `fsl-node --help`.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from click.shell_completion import CompletionItem

_T = TypeVar("_T", bound="Options")


class Declared:
    """An option or argument of a command, as its field declares it. more: as click takes it.

    roles: of a node, those that take it. refused: why others do not, if not by their role alone.
    """

    def __init__(
        self,
        kind: type[click.Parameter],
        name: str = "",
        *,
        roles: str = "",
        refused: str = "",
        **more: Any,
    ) -> None:
        self.kind = kind
        self.name = name
        self.roles = roles
        self.refused = refused
        self.more = more

    def parameter(self, field: str, annotation: str) -> click.Parameter:
        """Make click's parameter, of the name `field`."""
        more = dict(self.more)
        if annotation.startswith("Path") and more.get("type") is None:
            more["type"] = click.Path(path_type=Path)
        if self.kind is click.Argument:
            return click.Argument([field], **more)
        if annotation == "bool":
            more["is_flag"] = True
        elif annotation.startswith("tuple"):
            more.setdefault("multiple", "nargs" not in more)
        return click.Option([self.name or f"--{field.replace('_', '-')}", field], **more)


def option(
    text: str = "", kind: Any = None, metavar: str | None = None, *, name: str = "", **more: Any
) -> Any:
    """Declare an option by its help, its type and its value in help.

    name: by default `--` and the field's. A default other than an empty one is shown in help.
    """
    shows = more.get("default") not in (None, "", ())
    more = {"help": text or None, "type": kind, "metavar": metavar, "show_default": shows, **more}
    return Declared(click.Option, name, **more)


def argument(kind: Any = None, **more: Any) -> Any:
    """Declare an argument, whose value in help is its field's name in capitals."""
    return Declared(click.Argument, type=kind, **more)


class Options:
    """The options of a command: annotated fields, each declared by `option` or `argument`."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)

    @classmethod
    def declared(cls) -> dict[str, Declared]:
        """Return the fields in their order, those of base classes last."""
        fields = [item for one in cls.__mro__ for item in vars(one).items()]
        return {name: one for name, one in fields if isinstance(one, Declared)}

    @classmethod
    def parameters(cls) -> list[click.Parameter]:
        """Return click's parameters."""
        kinds: dict[str, str] = {}
        for one in reversed(cls.__mro__):
            kinds |= vars(one).get("__annotations__", {})
        return [each.parameter(name, kinds[name]) for name, each in cls.declared().items()]


class WithJson(Options):
    """The options of a command that prints one result."""

    as_json: bool = option("Print one JSON object.", name="--json")


def takes(options: type[_T]) -> Callable[[Callable[[_T], Any]], Callable[..., Any]]:
    """Give a command its options as one object. Stands under `click.command`."""

    def taken(function: Callable[[_T], Any]) -> Callable[..., Any]:
        def command(**given: Any) -> Any:
            return function(options(**given))

        command.__doc__ = function.__doc__
        command.__click_params__ = options.parameters()[::-1]  # type: ignore[attr-defined]
        return command

    return taken


_NO_BOUND = 10**9
"""A limit from here on is none to a reader: help leaves it out, and only an error names it."""


def range_words(
    low: float | None, high: float | None, *, low_open: bool = False, full: bool = True
) -> str:
    """`1 to 64`, `at least 0`, `above 0 and at most 3,600`; empty without bounds.

    full: name every bound; otherwise leave out what is far above any use.
    """
    if high is not None and high >= _NO_BOUND and not full:
        high = None
    if low is None:
        return "" if high is None else f"at most {_number(high)}"
    if low_open:
        above = f"above {_number(low)}"
        return above if high is None else f"{above} and at most {_number(high)}"
    return f"at least {_number(low)}" if high is None else f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:,g}"


class Whole(click.IntRange):
    """A whole number in a range, which help and errors give in words."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """See click.ParamType."""
        found: int = click.INT.convert(value, param, ctx)
        _check_range(self, found, param, ctx)
        return found

    def _describe_range(self) -> str:
        # click shows it in help.
        return range_words(self.min, self.max, full=False)


class Finite(click.FloatRange):
    """A finite number in a range; without bounds any finite number.

    click's own ranges accept nan, and inf where there is no upper bound.
    """

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """See click.ParamType."""
        found: float = click.FLOAT.convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number", param, ctx)
        _check_range(self, found, param, ctx)
        return found

    def _describe_range(self) -> str:
        return range_words(self.min, self.max, low_open=self.min_open, full=False)


def _check_range(
    kind: click.IntRange | click.FloatRange,
    found: float,
    param: click.Parameter | None,
    ctx: click.Context | None,
) -> None:
    low, high = kind.min, kind.max
    is_low = low is not None and (found < low or (kind.min_open and found == low))
    if is_low or (high is not None and found > high):
        words = range_words(low, high, low_open=kind.min_open)
        kind.fail(f"{found} is outside the range: {words}", param, ctx)


_MOST = 200
"""Run directories that are offered."""
_RUN_FILES = ("journal.jsonl", "ledger.jsonl", "ps/journal.jsonl", "server/journal.jsonl")


class RunDir(click.Path):
    """A path, usually of a run directory. A shell completes the names of run directories."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Offer runs of that beginning, first those under `runs`; the shell's folders if none."""
        from click.shell_completion import CompletionItem

        found = _runs_beginning(incomplete) or ([] if incomplete else _runs_beginning("runs/"))
        if not found:
            return [CompletionItem(incomplete, type="dir")]
        return [CompletionItem(name) for name in found]


def _runs_beginning(text: str) -> list[str]:
    """The run directories whose path begins with `text`, newest first."""
    above, slash, beginning = text.rpartition("/")
    found: list[tuple[float, str]] = []
    with contextlib.suppress(OSError):
        for path in Path(f"{above}{slash}" or ".").expanduser().iterdir():
            if path.name.startswith(beginning) and path.name.isprintable():
                files = [path / one for one in _RUN_FILES if (path / one).is_file()]
                times = [one.stat().st_mtime for one in files]
                found += [(-max(times), f"{above}{slash}{path.name}")] if times else []
    return [name for _, name in sorted(found)[:_MOST]]


class Words(click.types.StringParamType):
    """Any text. A shell completes some words, which are known without imports or by a function."""

    def __init__(self, *words: str, files: bool = False) -> None:
        """files: a path, too."""
        self._words = words
        self._files = files

    def words(self, incomplete: str) -> Iterable[str]:
        """The words offered for that beginning."""
        return self._words

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """See click.ParamType."""
        from click.shell_completion import CompletionItem

        found = [word for word in self.words(incomplete) if word.startswith(incomplete)]
        if not found and self._files:
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(word) for word in found]


class Setting(Words):
    """`table.key=value`. A shell completes keys, and values that are one of a few."""

    def words(self, incomplete: str) -> Iterable[str]:
        """See Words."""
        from fsl_async.config.load import setting_choices

        choices = setting_choices()
        key, equals, _ = incomplete.partition("=")
        if not equals:
            return [f"{one}=" for one in choices]
        return [f"{key}={value}" for value in choices.get(key, ())]
