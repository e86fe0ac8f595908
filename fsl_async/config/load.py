"""Reads and writes the run's configuration: TOML, --set overrides, and the part sent to clients.

The settings themselves are in `fsl_async.config.settings` and
`fsl_async.config.settings_training`. An error is a `ConfigError` with a line for each wrong
setting, which begins with where the setting came from and its dotted key:

    fsl.toml: sync.evry_s: unknown key, did you mean sync.every_s?
    fsl.toml: sync.every_s: expected a number, got "ten"
    --set: sync.quorum: must be above 0 and at most 1, got 2.0
    --name: must be 1 to 64 letters, digits, dots, dashes or underscores, got "a/b"

Only the parameter server has the whole configuration. `to_wire` makes the tables that clients
receive in the welcome, without listen address and run directory. `from_wire` checks them like a
file, but skips unknown keys, so that a newer parameter server may add some. Nothing that names a
path, a file or code crosses the network: `to_wire` leaves it out, and `from_wire` drops it in case
a hostile parameter server sends it. A client adds its own paths afterwards (`from_tables`).
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

import attrs

from fsl_async.config.presets import PUBLISHED, SIZES
from fsl_async.config.recipes import limits_of
from fsl_async.config.rules import OWN, SettingError, is_own, problem_of, show
from fsl_async.config.settings import TABLES, Config
from fsl_async.errors import ConfigError, printable, program

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

FIXED = "fixed for the whole run"
OMP_THREADS = "OMP_NUM_THREADS"
_WELCOME = "the parameter server's welcome"
_MAX_FILE_BYTES = 1 << 20
_OVERRIDE = "--set"
_SHOWN_PROBLEMS = 20
# Clients do not need the listen address and the run directory.
_WIRE_TABLES = (
    "sync", "outer", "codec", "session", "transfer", "exchange", "data", "model", "train", "split",
    "tune",
)  # fmt: skip
# Rounds: a privacy budget is for all of them.
_WIRE_RUN_KEYS = ("name", "seed", "rounds")
_LOCAL_KEYS = (("data", "path"), ("tune", "base"), ("tune", "merge"))
_RULE_KEYS = (
    ("outer", "aggregation"), ("outer", "optimizer"), ("outer", "channel"), ("tune", "rule"),
    ("tune", "merge"),
)  # fmt: skip
"""Settings that may name a file with a rule of the parameter server's operator."""
_CODE_KEYS = (("train", "task"), ("model", "family"), ("split", "auxiliary"), *_RULE_KEYS[:3])
"""Settings that may name a file of the user's code."""


def load(
    path: Path | str | None,
    overrides: Iterable[str] = (),
    options: Mapping[str, str] | None = None,
) -> Config:
    """Read a TOML file (None: all defaults), then apply `table.key=value` overrides in order.

    An override's value is read as TOML. It is taken as a bare string if it is not TOML, or if the
    setting is a string. Rules of the operator's own: a file that the TOML file names is relative to
    its folder, and `tune.rule` of a file stands for `tune.merge`.
    options: dotted key -> the command-line option that made the override, for errors.
    Raises ConfigError.
    """
    raw = _read(path) if path is not None else {}
    for name, table, key in _own_rules(raw):
        raw[table][key] = str(Path(path or "").parent / Path(name).expanduser())
    where = str(path) if path is not None else "configuration"
    tables = ((name, table) for name, table in raw.items() if isinstance(table, dict))
    written = {f"{name}.{key}" for name, table in tables for key in table}
    overridden: set[str] = set()
    for text in overrides:
        key, value = parse_override(text)
        table, _, name = key.partition(".")
        if not isinstance(raw.setdefault(table, {}), dict):
            raise ConfigError(f"{where}: {table}: expected a table, got {show(raw[table])}", table)
        raw[table][name] = value
        overridden.add(key)

    for name, table, key in _own_rules(raw):
        if key == "rule":
            raw[table]["merge"] = name
            del raw[table][key]

    def label(key: str) -> str:
        if options is not None and key in options:
            return options[key]
        # An error about an unknown table names the table only.
        given = key in overridden or any(one.startswith(f"{key}.") for one in overridden)
        return f"{_OVERRIDE if given else where}: {key}"

    return _structure(_with_preset(raw, written, overridden), label, strict=True)


def with_settings(config: Config, overrides: Iterable[str]) -> Config:
    """Return a checked configuration with `table.key=value` overrides. Raises ConfigError."""
    raw = attrs.asdict(config)
    for text in overrides:
        key, value = parse_override(text)
        table, _, name = key.partition(".")
        raw.setdefault(table, {})[name] = value
    return _structure(raw, lambda key: f"{_OVERRIDE}: {key}", strict=True)


def _own_rules(raw: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return each setting that names a file with a rule: its value, table and key."""
    tables = {name: table for name, table in raw.items() if isinstance(table, dict)}
    given = [(tables.get(table, {}).get(key), table, key) for table, key in _RULE_KEYS]
    return [(one, table, key) for one, table, key in given if isinstance(one, str) and is_own(one)]


def _with_preset(raw: dict[str, Any], written: set[str], overridden: set[str]) -> dict[str, Any]:
    """Put the settings of `split.preset` under those that are given.

    written, overridden: keys of the file and of overrides. Values of the file count as given,
    except defaults in a file that has all settings: `init` writes those.
    """
    split = raw.get("split")
    name = split.get("preset") if isinstance(split, dict) else None
    preset = PUBLISHED.get(name, {}) if isinstance(name, str) else {}
    has_all = written.issuperset(preset)
    for key, value in preset.items():
        table, _, one = key.partition(".")
        found = raw.setdefault(table, {})
        usual = getattr(attrs.fields(TABLES[table]), one).default
        is_default = has_all and isinstance(found, dict) and found[one] == usual
        given = key in overridden or (key in written and not is_default)
        if isinstance(found, dict) and not given:
            found[one] = value
    return raw


def resolved(config: Config) -> Config:
    """Fill in defaults that depend on others: {name}, sizes of the preset, shards, torch's threads.

    `split.preset` is "none" then: its settings are filled in, and loading them must not replace
    those that were given beside it.

    Raises ConfigError where a given size does not fit those of the preset.
    """
    model, sizes = config.model, SIZES[config.model.preset]
    try:
        model = attrs.evolve(
            model,
            layers=model.layers or sizes.layers,
            width=model.width or sizes.width,
            heads=model.heads or sizes.heads,
            context=model.context or sizes.context,
        )
    except SettingError as error:
        text = (
            f"configuration: {error.key}: {error.problem} with model.preset {config.model.preset}"
        )
        raise ConfigError(text, error.key) from None
    return attrs.evolve(
        config,
        run=attrs.evolve(config.run, directory=str(config.run_dir)),
        data=attrs.evolve(config.data, shards=config.shards),
        model=model,
        train=attrs.evolve(config.train, threads=threads_here(config.train.threads)),
        split=attrs.evolve(config.split, preset="none"),
    )


def cores() -> int:
    """Return the number of cores that this process may use, by its container or batch system."""
    try:
        return len(os.sched_getaffinity(0))
    # macOS has no such function.
    except AttributeError:
        return os.cpu_count() or 1


def threads_here(setting: int) -> int:
    """Return `train.threads` of this machine: the setting, else OMP_NUM_THREADS, else all cores."""
    text = os.environ.get(OMP_THREADS, "").partition(",")[0].strip()
    given = int(text[:4]) if text.isascii() and text.isdecimal() else 0
    return setting or given or cores()


def to_wire(config: Config) -> dict[str, dict[str, Any]]:
    """Return the tables that clients receive in the welcome."""
    tables = attrs.asdict(config)
    wire = {name: tables[name] for name in _WIRE_TABLES}
    wire["run"] = {key: tables["run"][key] for key in _WIRE_RUN_KEYS}
    if config.guard.evaluator:  # sites see who gets their deltas
        wire["guard"] = {"evaluator": config.guard.evaluator}
    return _without_local(wire)


def _without_local(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables without local paths, and with `OWN` for each name of a file with code."""
    made = {
        name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()
    }
    for name, key in _LOCAL_KEYS:
        if isinstance(made.get(name), dict):
            made[name].pop(key, None)
    for name, key in _CODE_KEYS:
        table = made.get(name)
        if isinstance(table, dict) and isinstance(table.get(key), str) and is_own(table[key]):
            table[key] = OWN
    return made


def from_wire(tables: object) -> Config:
    """Read the tables of `to_wire` from an untrusted parameter server. Raises ConfigError."""
    if not isinstance(tables, dict):
        raise ConfigError(f"{_WELCOME}: expected tables, got {show(tables)}")
    return from_tables(_without_local(tables))


def from_tables(tables: Mapping[str, Any]) -> Config:
    """Read the tables of a welcome, with what the client's site has added. Raises ConfigError."""
    known: dict[str, Any] = {name: tables[name] for name in _WIRE_TABLES if name in tables}
    run = tables.get("run", {})
    if not isinstance(run, dict):
        raise ConfigError(f"{_WELCOME}: run: expected a table, got {show(run)}", "run")
    known["run"] = {key: run[key] for key in _WIRE_RUN_KEYS if key in run}
    guard = tables.get("guard", {})
    if isinstance(guard, dict) and "evaluator" in guard:
        known["guard"] = {"evaluator": guard["evaluator"]}
    return _structure(known, lambda key: f"{_WELCOME}: {key}", strict=False)


def to_toml(config: Config, *, comments: bool = True) -> str:
    """Write the configuration as TOML, each key under its line of help."""
    lines: list[str] = []
    if comments:
        lines += [
            "# Configuration of an fsl-async run; the parameter server sends clients their part.",
            f"#     {program()} --role ps --config fsl.toml",
            "# Values are defaults unless changed; --set table.key=value changes one for a start.",
            "",
        ]
    for name, table in TABLES.items():
        if comments and table.__doc__:
            lines.append(f"# {table.__doc__.splitlines()[0]}")
        lines.append(f"[{name}]")
        values = getattr(config, name)
        for field in attrs.fields(table):
            line = f"{field.name} = {_toml_value(getattr(values, field.name))}"
            if comments:
                fixed = f" ({FIXED})" if field.metadata["fixed"] else ""
                lines.append(f"# {field.metadata['help']}{fixed}")
                limits = limits_of(f"{name}.{field.name}")
                lines += [f"#     {limit}".replace("`", "") for limit in limits]
            lines.append(line)
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


SHORT: Mapping[str, str] = {
    "run.name": "",
    "run.tokens": "",
    "run.seconds": "end after this many seconds of serving; 0 = no limit",
    "listen.address": "",
    "sync.clients": "",
    "sync.every_s": "",
    "sync.quorum": "",
    "data.source": "site (a client has --data) | built-in (Python's source)",
    "data.sharding": "disjoint (parts of one text) | local (own texts)",
    "model.preset": "0.5m | 1m | 3m | 10m | 50m | 124m | 350m | 1b",
    "train.batch": "",
    "train.device": "",
}
"""Settings that `init --short` writes, with comments that fit beside the value, or "" for help."""


def short_toml(config: Config) -> str:
    """Write the settings that most runs change as TOML, each with its comment on the same line."""
    lines = [
        f"# Settings that most runs change; `{program()} init` writes all. * = {FIXED}.",
        f"#     {program()} --role ps --config fsl.toml",
    ]
    given = {
        key: f"{name} = {_toml_value(getattr(getattr(config, table), name))}"
        for key in SHORT
        for table, _, name in [key.partition(".")]
    }
    width = max(map(len, given.values()))
    for key, comment in SHORT.items():
        table, _, name = key.partition(".")
        if f"[{table}]" not in lines:
            lines.append(f"[{table}]")
        metadata = getattr(attrs.fields(TABLES[table]), name).metadata
        fixed = "* " if metadata["fixed"] else ""
        lines.append(f"{given[key]:{width}}  # {fixed}{comment or metadata['help']}")
    return "\n".join(lines) + "\n"


def setting_choices() -> dict[str, tuple[str, ...]]:
    """Return the dotted key of every setting, and the values of those that are one of a few."""
    return {
        key: ("true", "false") if kind is bool else _choices(kind) for key, kind in _types().items()
    }


def _toml_value(value: bool | float | str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # Of printable text, JSON's escapes are TOML's.
        return json.dumps(value, ensure_ascii=False)
    return repr(value)


def _read(path: Path | str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `{program()} init {path}` writes one") from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"{path}: larger than {_MAX_FILE_BYTES:,} bytes; is it a TOML file?")
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    # A number of 5,000 digits is a ValueError too.
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None


def parse_override(text: str) -> tuple[str, Any]:
    """Read "table.key=value" into the dotted key and the value. Raises ConfigError."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or key.count(".") != 1 or key.startswith(".") or key.endswith("."):
        raise ConfigError(
            f"{_OVERRIDE} {text[:120]}: write it as table.key=value, for example {_OVERRIDE}"
            " sync.every_s=60"
        )
    value = value.strip()
    try:
        parsed = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return key, value
    # A line break in the value adds keys.
    if set(parsed) != {"value"}:
        return key, value
    found = parsed["value"]
    kind = _types().get(key)
    is_text = kind is str or _choices(kind)
    return key, value if is_text and not isinstance(found, str) else found


_KINDS: Mapping[type, tuple[str, tuple[type, ...]]] = {
    str: ("a string", (str,)),
    bool: ("true or false", (bool,)),
    int: ("a whole number", (int,)),
    float: ("a number", (int, float)),
}


def _structure(raw: dict[str, Any], label: Callable[[str], str], *, strict: bool) -> Config:
    """Make a Config of tables.

    label: of a dotted key, the beginning of an error about it. strict: unknown tables and keys are
    errors, else they are skipped. Raises ConfigError with all problems, in the order of the tables.
    """
    made: dict[str, Any] = {}
    problems: list[tuple[str, str]] = []
    for name, table in raw.items():
        if name not in TABLES:
            found = [_unknown("", name, raw)] if strict else []
        elif not isinstance(table, dict):
            found = [(name, f"expected a table, got {show(table)}")]
        else:
            values: dict[str, Any] = {}
            found = list(_taken(name, table, values, strict=strict))
            try:
                # A class whose values do not fit together raises the first problem.
                made[name] = None if found else TABLES[name](**values)
            except SettingError as error:
                found = [(error.key, error.problem)]
        problems += found
    if not problems:
        return Config(**made)
    lines = [f"{label(key)}: {problem}" for key, problem in problems[:_SHOWN_PROBLEMS]]
    if len(problems) > _SHOWN_PROBLEMS:
        lines.append(f"and {len(problems) - _SHOWN_PROBLEMS:,} more errors")
    raise ConfigError("; ".join(lines), problems[0][0], lines)


def _taken(
    name: str, table: Mapping[str, Any], values: dict[str, Any], *, strict: bool
) -> Iterator[tuple[str, str]]:
    """Put a table's values into `values`; yield the key and problem of wrong ones."""
    fields = attrs.fields_dict(TABLES[name])
    for key, value in table.items():
        if key not in fields:
            if strict:
                yield _unknown(name, key, table)
            continue
        dotted = f"{name}.{key}"
        try:
            values[key] = found = _typed(value, _types()[dotted])
            problem = problem_of(fields[key], found)
        # A whole number may be too large for a float.
        except (TypeError, OverflowError) as error:
            problem = str(error)
        if problem is not None:
            yield dotted, problem


def _typed(value: Any, kind: Any) -> Any:
    """Return a value as one of a setting's type. Raises TypeError."""
    if choices := _choices(kind):
        may_be_own = get_origin(kind) is not Literal
        if isinstance(value, str) and (value in choices or (may_be_own and is_own(value))):
            return value
        asked = value.lower() if isinstance(value, str) else ""
        close = difflib.get_close_matches(asked, choices, n=1)
        meant = f", did you mean {close[0]}?" if close else ""
        own = " or file.py:Class" if may_be_own else ""
        raise TypeError(f"expected one of {', '.join(choices)}{own}, got {show(value)}{meant}")
    expected, accepted = _KINDS[kind]
    # 2e9 is a float in TOML; beyond 2^53 a float is no exact whole number.
    whole = type(value) is float and value.is_integer() and abs(value) <= 2**53
    if type(value) not in accepted and not (kind is int and whole):
        raise TypeError(f"expected {expected}, got {show(value)}")
    return kind(value)


def _choices(kind: Any) -> tuple[str, ...]:
    """Return the values of a setting that is one of a few, or those or a file.py:Class."""
    found = get_args(kind)
    return _choices(found[0]) if found and get_origin(kind) is not Literal else found


CONSTANTS = {
    *("sync.grace_mad_factor", "sync.grace_min_s", "sync.first_grace_s", "sync.least_s"),
    *("sync.staleness_exponent", "guard.least", "codec.block_values"),
    *("data.pieces", "data.label_counts", "transfer.stripes_first", "transfer.stall_s"),
    *("transfer.drain_cap_s", "transfer.window_bytes", "store.snapshot_every"),
    *("store.snapshot_every_s", "store.snapshot_bytes_per_s", "train.final_rate"),
    *("train.hang_factor", "train.rewarm_steps", "split.max_stale_rounds"),
    *("split.auxiliary_optimizer", "split.auxiliary_rate", "split.auxiliary_decay"),
    *("split.checkpoint_every", "groups.timeout_s", "groups.grace_s"),
}
"""Keys that were settings; files of earlier commits have them."""
REPLACED = {
    "codec.step_log2": "now codec.up_step and codec.down_step, 2^(-step_log2/4) of a block's rms",
    "codec.feedback_up": "leave it out: what coding loses is always sent with the next delta",
}


def _unknown(table: str, name: str, raw: Mapping[str, Any]) -> tuple[str, str]:
    """Return the key of an unknown key or table, and a message with the most similar known one."""
    shown = printable(name)
    if shown == "ring" and not table:
        return shown, "this table is called groups now"
    if not table and isinstance(raw.get(name), dict):
        close = difflib.get_close_matches(name, TABLES, n=1)
        meant = f"did you mean {close[0]}?" if close else f"the tables are {', '.join(TABLES)}"
        return shown, f"unknown table, {meant}"
    key = f"{table}.{shown}" if table else shown
    if key in REPLACED:
        return key, REPLACED[key]
    if key in CONSTANTS:
        return key, "this is a constant now: leave it out"
    own = {field.name for field in attrs.fields(TABLES[table])} if table else set()
    close = [f"{table}.{match}" for match in difflib.get_close_matches(name, own, n=1)]
    if not close:
        elsewhere = [dotted for dotted in _types() if dotted.partition(".")[2] == name]
        close = elsewhere or difflib.get_close_matches(key, _types(), n=1)
    if close:
        return key, f"unknown key, did you mean {close[0]}?"
    if table:
        return key, f"unknown key, [{table}] has {', '.join(sorted(own))}"
    return key, f"unknown key, the tables are {', '.join(TABLES)}"


@functools.cache
def _types() -> dict[str, Any]:
    """Return the type of every setting by its dotted key."""
    return {
        f"{name}.{key}": kind
        for name, table in TABLES.items()
        for key, kind in get_type_hints(table).items()
    }
