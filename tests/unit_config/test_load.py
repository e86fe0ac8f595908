"""Configuration: TOML in, frozen values out, and errors with file, key and remedy."""

import tomllib
from pathlib import Path
from typing import get_args

import attrs
import pytest
from golden import VECTORS, golden
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.cli import main
from fsl_async.config import rules as setting_rules
from fsl_async.config import settings, settings_training
from fsl_async.config.load import from_wire, load, resolved, to_toml, to_wire
from fsl_async.config.rules import SettingError
from fsl_async.config.settings import TABLES, Config, SyncConfig, TransferConfig
from fsl_async.errors import ConfigError

DEFAULTS = VECTORS / "default_settings.toml"


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def failure(text, overrides=()):
    Path("fsl.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load("fsl.toml", overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in caught.value.message
    return caught.value


@pytest.mark.parametrize(
    ("text", "line"),
    [*golden("wrong_settings.txt"), ('[sync] ; "a\\u001b[1m" = 1', None), ("[sync", None)],
)
def test_bad_files_get_one_precise_line(in_folder, text, line):
    """Each error names the file, the dotted key, and what to write instead."""
    error = failure(text.replace(" ; ", "\n"))
    if line is None:
        assert error.message.startswith("fsl.toml: ")
        assert error.message.isprintable()
    else:
        assert error.message == f"fsl.toml: {line.replace('{tables}', ', '.join(TABLES))}"


def test_all_errors_of_a_file_come_at_once(in_folder, capsys):
    """They came one at a time: each start of the server found the next one."""
    text = """listen = 5
[run]
name = "a b"
rounds = 1.5
sped = 1
seconds = -1.0
[sync]
clients = "many"
quorum = 7
every_s = inf
min_clients = 2
[snyc]
a = 1
[session]
heartbeat_every_s = 15
"""
    lines = (
        "fsl.toml: listen: expected a table, got 5",
        (
            "fsl.toml: run.name: must be 1 to 64 letters, digits, dots, dashes or underscores,"
            ' got "a b"'
        ),
        "fsl.toml: run.rounds: expected a whole number, got 1.5",
        "fsl.toml: run.sped: unknown key, did you mean run.seed?",
        "fsl.toml: run.seconds: must be at least 0, got -1.0",
        'fsl.toml: sync.clients: expected a whole number, got "many"',
        "fsl.toml: sync.quorum: must be above 0 and at most 1, got 7.0",
        "--set: sync.every_s: must be above 0, got -1.0",
        "fsl.toml: snyc: unknown table, did you mean sync?",
        (
            "fsl.toml: session.expire_after_s: must be at least twice session.heartbeat_every_s"
            " (15.0), got 20.0"
        ),
    )
    error = failure(text, ["sync.every_s=-1.0"])
    assert error.lines == lines  # in the order of the file
    assert error.message == "; ".join(error.lines)
    assert main(["--role", "ps", "--config", "fsl.toml", "--set", "sync.every_s=-1.0"]) == 2
    assert capsys.readouterr().err == "".join(f"error: {line}\n" for line in error.lines)


def test_a_file_of_another_kind_gets_few_lines(in_folder):
    """A thousand unknown keys must not scroll the first one away."""
    error = failure("".join(f"key{number} = 1\n" for number in range(1000)))
    assert len(error.lines) == 21
    assert error.lines[-1] == "and 980 more errors"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (None, "no such file; `fsl-node init x.toml` writes one"),
        (b"[run]\nname = \n", "not valid TOML: Invalid value (at line 2, column 8)"),
        (b"[data]\npath = '\xe9'", "not UTF-8 text (byte 15)"),
        (b"\xff\xfe\x00", "not UTF-8 text (byte 0)"),
        (b"# " + b"x" * (1 << 20), "larger than 1,048,576 bytes"),
        (b"a = " + b"[" * 5000, "not valid TOML: "),
        (b"a = " + b"9" * 5000, "not valid TOML: "),
    ],
)
def test_a_file_that_is_no_toml_is_one_line(in_folder, data, problem):
    """A wrong path is the most frequent mistake; a wrong file must give no traceback."""
    if data is not None:
        (in_folder / "x.toml").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        load("x.toml")
    assert caught.value.message.startswith(f"x.toml: {problem}")


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_numbers_that_no_message_can_carry(digits):
    """A limit of 10^22 versions was once accepted and ended the parameter server at the first
    client.
    """
    with pytest.raises(ConfigError, match=r"--set: sync\.max_staleness: "):
        load(None, [f"sync.max_staleness={'9' * digits}"])
    with pytest.raises(ConfigError, match=r"--set: sync\.every_s: "):
        load(None, [f"sync.every_s=1{'0' * 400}"])
    assert load(None, [f"sync.max_staleness={(1 << 63) - 1}"]).sync.max_staleness == (1 << 63) - 1


def test_text_is_utf8_with_or_without_a_mark(in_folder):
    """Windows editors write a byte order mark."""
    (in_folder / "x.toml").write_bytes("[data]\npath = 'é'\n".encode("utf-8-sig"))
    assert load("x.toml").data.path == "é"


def test_a_directory_is_not_a_file(in_folder):
    """An OSError must become one line too."""
    with pytest.raises(ConfigError, match=r"\.: Is a directory"):
        load(".")


def test_an_error_names_the_source_of_its_key(in_folder):
    """An error in --set must not point to the file."""
    assert failure("[sync]\nquorum = 0.6", ["sync.quorum=3"]).message == (
        "--set: sync.quorum: must be above 0 and at most 1, got 3.0"
    )
    assert failure("[sync]\nquorum = 3.0", ["sync.every_s=3"]).message.startswith("fsl.toml: ")


@pytest.mark.parametrize(
    "text", ["sync", "sync.every_s", "every_s=5", "a.b.c=4", ".a=4", "a.=4", "=3"]
)
def test_overrides_need_their_form(text):
    """The error for a malformed --set must have an example."""
    with pytest.raises(ConfigError, match=r"write it as table\.key=value"):
        load(None, [text])


def test_override_values_are_toml_and_bare_words_are_strings():
    """`--set codec.up=bf16` must work without quotes, and numbers for text settings stay text."""
    made = load(
        None,
        [
            "codec.up=bf16",
            "sync.every_s=60",
            "sync.quorum = 1",
            "listen.insecure=true",
            "run.name=2024-01-01",
            'data.path="quoted path"',
            "data.path=/a=b c",
            "run.seed=0x10",
            "run.tokens=2e9",
        ],
    )
    assert made.codec.up == "bf16"
    assert (made.sync.every_s, made.sync.quorum) == (60.0, 1.0)
    assert isinstance(made.sync.every_s, float)
    assert made.listen.insecure is True
    assert made.run.name == "2024-01-01"
    assert made.data.path == "/a=b c"
    assert made.run.seed == 16
    assert (made.run.tokens, type(made.run.tokens)) == (2_000_000_000, int)


def test_an_override_cannot_add_keys():
    """A line break in a value must not become a second TOML line."""
    with pytest.raises(ConfigError, match=r"data\.path: must be printable"):
        load(None, ["data.path=1\nsync = 2"])
    with pytest.raises(ConfigError, match=r"sync\.every_s: expected a number"):
        load(None, ["sync.every_s=1\nsync = 2"])


def test_overrides_win_over_the_file_and_the_last_one_over_earlier(in_folder):
    """Precedence: default, file, overrides in order."""
    (in_folder / "a.toml").write_text("[sync]\nevery_s = 1\nquorum = 0.75\n")
    made = load("a.toml", ["sync.every_s=2", "sync.every_s=3"])
    assert (made.sync.every_s, made.sync.quorum, made.sync.clients) == (3.0, 0.75, 3)


def test_defaults_are_those_that_are_written_down():
    """A changed default changes everyone's runs, so the file must be changed with it."""
    assert to_toml(Config(), comments=False) == DEFAULTS.read_text()


@pytest.mark.parametrize("comments", [True, False])
def test_toml_comes_back_as_it_was(tmp_path, comments):
    """The output of `init` and --dry-run must load to the same configuration."""
    made = load(
        None, ['data.path=/a "b" \\c', "sync.every_s=1e-5", "listen.insecure=true", "run.name=x"]
    )
    path = tmp_path / "x.toml"
    path.write_text(to_toml(made, comments=comments), encoding="utf-8")
    assert load(path) == made
    assert tomllib.loads(path.read_text()) == attrs.asdict(made)


def test_every_setting_has_a_line_of_help():
    """`init` documents all settings: each needs one line of help."""
    lines = [one for one in to_toml(Config()).splitlines() if not one.startswith("#     ")]
    written = "\n".join(lines)
    for table in TABLES.values():
        for field in attrs.fields(table):
            text = field.metadata["help"]
            assert text, field.name
            assert "\n" not in text
            fixed = " (fixed for the whole run)" if field.metadata["fixed"] else ""
            assert f"# {text}{fixed}\n{field.name} = " in written


def test_values_made_in_python_are_checked_too():
    """Tests and the demo make settings directly, so ranges must be checked there too."""
    with pytest.raises(SettingError, match=r"sync\.quorum: must be above 0 and at most 1, got -1"):
        SyncConfig(quorum=-1)


def test_clients_get_no_paths_of_the_parameter_server():
    """The welcome must not disclose the parameter server's paths and listen address."""
    wire = to_wire(
        load(None, ["run.directory=/secret", "run.seed=7", "run.rounds=9", "codec.up=fp32"])
    )
    assert "/secret" not in str(wire)
    assert "listen" not in wire
    got = from_wire(wire)
    assert (got.run.seed, got.run.rounds, got.codec.up) == (7, 9, "fp32")
    assert from_wire(to_wire(Config())) == Config()


def test_a_newer_servers_keys_are_skipped_and_values_still_checked():
    """A client must work with a newer parameter server, but never with a value out of range."""
    wire = to_wire(Config())
    wire["sync"]["later"] = 1
    wire["extra"] = {}
    assert from_wire(wire) == Config()
    wire["sync"]["quorum"] = 5
    with pytest.raises(ConfigError) as caught:
        from_wire(wire)
    assert caught.value.message == (
        "the parameter server's welcome: sync.quorum: must be above 0 and at most 1, got 5.0"
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(json_values | st.fixed_dictionaries({}, optional=dict.fromkeys(TABLES, json_values)))
def test_from_wire_takes_anything_or_says_why_not(value):
    """The welcome comes from the network: any value gives a Config or a ConfigError."""
    message = ""
    try:
        assert isinstance(from_wire(value), Config)
    except ConfigError as error:
        message = error.message
    assert message.isprintable()


@given(st.text(max_size=30).map(lambda text: f"sync.every_s={text}"))
def test_any_override_text_is_a_config_or_a_config_error(text):
    """No text of a shell may cause a traceback."""
    message = ""
    try:
        load(None, [text])
    except ConfigError as error:
        message = error.message
    assert message.isprintable()


def test_presets_and_formats_are_the_ones_that_exist():
    """The settings repeat names that other packages define."""
    from fsl_async.config.presets import SIZES
    from fsl_async.roles.sync.weighting import WEIGHTINGS
    from fsl_codecs.formats import FORMATS

    assert get_args(settings_training.Preset) == tuple(SIZES)
    # outer.aggregation implies these.
    implied = {"latest", "latest-tuned"}
    assert set(get_args(settings.Weighting)) == {"auto", *WEIGHTINGS} - implied
    assert set(get_args(setting_rules.Format)) == set(FORMATS)


@pytest.mark.parametrize("more", [[], ["model.width=64", "model.heads=2"]])
@pytest.mark.parametrize("preset", get_args(settings_training.Preset))
def test_resolved_sizes_are_those_that_clients_build(preset, more):
    """The model of --dry-run must be the one that is trained."""
    from fsl_async.learn.models.gpt import gpt_config

    loaded = load(None, [f"model.preset={preset}", *more])
    model = resolved(loaded).model
    built = gpt_config(to_wire(loaded))
    assert (model.layers, model.width, model.heads, model.context) == (
        built.layers,
        built.width,
        built.heads,
        built.context,
    )


def test_run_directory_and_shards_follow_from_other_settings():
    """`{name}` and 0 are replaced by other settings."""
    made = load(None, ["run.name=abc", "sync.clients=5"])
    assert str(made.run_dir) == "runs/abc"
    assert made.shards == 5
    assert load(None, ["data.shards=9"]).shards == 9


def test_the_smallest_window_is_large_enough_for_the_transport():
    """A window that the settings allow must be valid for the transport, or a run ends with "this is
    a bug".
    """
    made = Config(transfer=TransferConfig(window_limit_bytes=4 << 20)).transport()
    assert made.window_bytes == made.window_limit_bytes


@pytest.mark.parametrize(
    "sizes",
    ["hidden_act=xielu", "attn_implementation=flash_attention_2", "quantization_config=x", "_x=1"],
)
def test_sizes_choose_no_code(sizes):
    """The parameter server sends them, and they must not choose code that a client imports."""
    with pytest.raises(ConfigError, match="must be numbers by name"):
        load(None, [f"model.sizes={sizes}"])
    assert load(None, ["model.sizes=hidden_act=gelu_new, eps=1e-5"]).model.sizes


def test_a_setting_that_became_a_constant_is_named_as_one():
    """A similar key would be followed, and would change something else."""
    with pytest.raises(ConfigError, match=r"groups\.timeout_s: this is a constant now"):
        load(None, ["groups.timeout_s=5"])
    with pytest.raises(ConfigError, match="ring: this table is called groups now"):
        load(None, ["ring.every=5"])
