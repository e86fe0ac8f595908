"""Declares settings, as attrs fields with a help line and a check, and defines the checks. Pure.

A check takes a value of the right type; it returns None when the value is fine, else "must be ...".
The settings are in `fsl_async.config.settings` and `fsl_async.config.settings_training`.
"""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import attrs

from fsl_async.errors import printable
from fsl_async.roles.names import NAME

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")
Check: TypeAlias = "Callable[[Any], str | None]"
"""Returns None for a value that fits, else "must be ..."."""

MAX_TEXT = 4096
LANGUAGE_FAMILIES = ("gpt", "gpt2", "llama", "qwen2", "qwen3", "opt")
"""Causal language models; all but the first are Hugging Face's."""
FAMILIES = (*LANGUAGE_FAMILIES, "resnet18", "small-cnn")
Format = Literal["fp32", "bf16", "e4m3", "e5m2", "uniform"]
"""The number formats of fsl_codecs."""


class SettingError(ValueError):
    """A setting is out of range. `key` is its dotted name; `problem` says what it must be."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key
        self.problem = problem


def show(value: object) -> str:
    """Format a value as in TOML, shortened, for error messages."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + printable(value if len(value) <= 80 else value[:80] + "...") + '"'
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "an array"
    return str(value)


def span(
    *, above: float | None = None, least: float | None = None, most: float | None = None
) -> Check:
    """Make a check that a number is above or at least one bound, and at most another."""
    bounds = []
    if above is not None:
        bounds.append(f"above {above:,}")
    if least is not None:
        bounds.append(f"at least {least:,}")
    if most is not None:
        bounds.append(f"at most {most:,}")
    text = "must be " + " and ".join(bounds)

    def check(value: Any) -> str | None:
        fits = (
            (above is None or value > above)
            and (least is None or value >= least)
            and (most is None or value <= most)
        )
        return None if fits else text

    return check


def like(pattern: str, text: str, *, also: Callable[[str], bool] = lambda _: False) -> Check:
    """Make a check that a text matches a pattern, or that `also` holds. text: "must be ..."."""
    found = re.compile(pattern)
    return lambda value: None if found.fullmatch(value) or also(value) else text


must_be_name = like(
    rf"(?!\.{{1,2}}$){NAME.pattern}", "must be 1 to 64 letters, digits, dots, dashes or underscores"
)
"""Checks the name of a run, a client or a file."""
may_be_name = like(rf"|{NAME.pattern}", "must be a client's name, or empty")
must_be_directory = like(
    r"(\{name\}|[^{}])+", "must be a path, in which {name} stands for run.name"
)
"""Checks a path that may hold the placeholder {name} and no other."""

OWN = "own"
"""Stands for code that every node brings itself.

On the wire it replaces file.py:function, which names a file of the sender.
"""


def is_own(value: str) -> bool:
    """Whether a setting names the user's own code: as file.py:function, or as `OWN`."""
    return value == OWN or re.fullmatch(r".+\.py:[A-Za-z_][A-Za-z0-9_]*", value) is not None


must_be_task = like(
    "",
    "must be file.py:function, own (each client brings its --task), or empty for the built-in task",
    also=is_own,
)
must_be_own_rule = like(
    r"|.+\.py:[A-Za-z_][A-Za-z0-9_]*", "must be file.py:Class, or empty for a built-in rule"
)
must_be_family = like(
    "|".join(FAMILIES), f"must be one of {', '.join(FAMILIES)}, or file.py:function", also=is_own
)
must_be_device = like(r"auto|cpu|mps|cuda(:[0-9]{1,3})?", "must be auto, cpu, cuda, cuda:N or mps")
must_be_betas = like(",".join([r"\s*(0|0?\.[0-9]{1,12})\s*"] * 2), "must be like 0.9,0.999")
"""Checks the two decay rates of Adam's moments."""
must_be_shape = like(r"([1-9][0-9]{0,5}(x[1-9][0-9]{0,5}){0,7})?", "must be like 3x32x32")
"""Checks the shape of a sample; an empty text is allowed."""
must_be_fingerprint = like(r"([0-9a-f]{32})?", "must be 32 hexadecimal digits")

ACTIVATION_FUNCTIONS = (
    "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "mish", "quick_gelu",
    "relu", "relu2", "relu6", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip
"""Activation functions of transformers that need no package but torch."""


LEAST_STEP, MOST_STEP = 0.05, 4.0
"""The smallest and the largest step of `uniform`, in root mean squares of a block."""


def must_be_step(value: float) -> str | None:
    """Check a step of `uniform`, or 0."""
    fits = value == 0 or LEAST_STEP <= value <= MOST_STEP
    return None if fits else f"must be from {LEAST_STEP} to {MOST_STEP:g}, or 0"


def must_be_date(value: Any) -> str | None:
    """Check a date with a time zone, in ISO 8601, or no date."""
    if not value:
        return None
    try:
        has_zone = datetime.fromisoformat(value).tzinfo is not None
    except ValueError:
        has_zone = False
    return None if has_zone else "must be a date with a time zone, like 2027-01-31T18:00+01:00"


def must_be_sizes(value: Any) -> str | None:
    """Check names with values, as in a model's configuration.

    Values are numbers, true, false, none, and one of `ACTIVATION_FUNCTIONS`. Other texts choose
    code (an attention kernel, a quantizer, an activation of another package), and the parameter
    server must not choose code that a client runs.
    """
    number = r"[A-Za-z][A-Za-z0-9_]*\s*=\s*([0-9.+-][0-9.eE+-]*|true|false|none)"
    function = rf"(hidden_act|activation_function)\s*=\s*({'|'.join(ACTIVATION_FUNCTIONS)})"
    one = rf"\s*({number}|{function})\s*"
    if not value or re.fullmatch(rf"{one}(,{one})*", value, re.IGNORECASE):
        return None
    return (
        "must be numbers by name, like hidden_size=64, num_hidden_layers=4 (hidden_act and"
        " activation_function take a name such as silu)"
    )


def problem_of(attribute: attrs.Attribute[Any], value: Any) -> str | None:
    """Return why the value of a setting, which has the right type, is wrong; None if it fits."""
    problem: str | None = None
    if isinstance(value, float) and not math.isfinite(value):
        problem = "must be a finite number"
    # MessagePack holds integers of 64 bits.
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        problem = "must be a whole number of at most 63 bits"
    elif isinstance(value, str) and (len(value) > MAX_TEXT or not (value.isprintable())):
        problem = f"must be printable text of at most {MAX_TEXT:,} characters"
    else:
        check = attribute.metadata["check"]
        problem = check(value) if check is not None else None
    return None if problem is None else f"{problem}, got {show(value)}"


def _validate(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    problem = problem_of(attribute, value)
    if problem is not None:
        raise SettingError(f"{table_name(type(instance))}.{attribute.name}", problem)


def setting(
    default: T,
    help_line: str,
    check: Check | None = None,
    *,
    fixed: bool = False,
) -> T:
    """Declare one setting: its default, its help line and its check.

    fixed: a run that has a version keeps its first value; see `fsl_async.config.fixed`.
    """
    metadata = {"help": help_line, "check": check, "fixed": fixed}
    return attrs.field(default=default, validator=_validate, metadata=metadata)


def table_name(table: type) -> str:
    """Return the name of a settings class's TOML table: `sync` for SyncConfig."""
    return table.__name__.removesuffix("Config").lower()
