"""The command line as a user sees it: one line for every mistake, help without heavy imports."""

import errno
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from golden import golden

from fsl_async import cli
from fsl_async.commands import COMMANDS
from fsl_async.config.load import threads_here
from fsl_async.errors import STAMP, program, to_install

REPOSITORY = Path(__file__).parents[2]


def run(capsys, *args):
    code = cli.main(args)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(("line", "message"), golden("mistakes.txt"))
def test_every_mistake_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, line, message):
    """Golden lines: each says what is wrong and what to do, without a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FSL_KEYS", str(tmp_path / "keys"))
    message = message.replace("{commands}", ", ".join(COMMANDS))
    assert run(capsys, *line.split()) == (2, "", f"error: {message}\n")


def test_with_json_a_mistake_is_one_object(capsys):
    """Errors must be JSON too, also those of the command line itself."""
    code, out, err = run(capsys, "--role", "relay", "--json")
    assert (code, err) == (2, "")
    assert json.loads(out)["kind"] == "UsageError"


def test_debug_shows_the_traceback_and_is_taken_anywhere(capsys):
    """--debug belongs to no command, so it must not be an unknown option of one."""
    for args in (["--debug", "--role", "x"], ["init", "--foo", "--debug"]):
        code, _, err = run(capsys, *args)
        assert code == 2
        assert err.startswith("Traceback")
        assert "error: " in err.splitlines()[-1]
    dry = "--debug --role client localhost:1 --name b --dry-run"
    assert run(capsys, *dry.split())[0] == 0


def test_records_are_read_before_the_parameter_server_is_dialed(capsys, tmp_path):
    """A wrong file, or a wrong column, ends the client with one line, and costs no session."""
    (tmp_path / "config.json").write_text("{}")
    data = tmp_path / "notes.csv"
    data.write_text('BODY,label\nfever,1\n"cough,0\n')
    args = ["--role", "client", "localhost:1", "--name", "b", "--dry-run", "--data", str(data)]
    tuned = [*args, "--base", str(tmp_path)]
    code, out, _ = run(capsys, *tuned, "--columns", "text=BODY")
    assert code == 0
    assert (
        "data notes.csv: BODY + label (classify), 1 of 2 rows used; 1 with a stray quote (line 3)"
    ) in out
    for given, message in (
        (tuned, "holds BODY, label. lm needs messages, prompt and completion, or text; classify"),
        ([*tuned, "--columns", "text=Body"], "has no column 'Body' for text; it has BODY, label"),
        ([*tuned, "--columns", "body=BODY"], "--columns 'body=BODY': write NAME=COLUMN, with a NA"),
        ([*args, "--columns", "text=BODY"], "--columns names columns of records: it goes with --b"),
        (["--role", "ps", "--columns", "text=BODY"], "--columns is a client's: of its records"),
    ):
        code, _, err = run(capsys, *given)
        assert code == 2
        assert message in err


@pytest.mark.parametrize("args", [["--help"], [], ["--role", "ps", "--help"], ["--role", "--help"]])
def test_help_lists_roles_commands_and_exit_codes(capsys, args):
    """--help must print all of it, whatever else is on the command line."""
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: fsl-node --role ps")
    for word in ("--from-version", "--dry-run", "--debug", "130", *COMMANDS):
        assert word in out


def test_every_listed_command_exists_and_has_json(capsys):
    """Every command of COMMANDS must exist and have --json."""
    for name in COMMANDS:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0, name
        assert "--json" in out, name


def test_version(capsys):
    """Bug reports begin with it."""
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("fsl-node 0.")


def test_a_bug_is_called_a_bug(capsys, monkeypatch):
    """An unexpected exception exits 1 with advice, and is still one line."""

    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("fsl_async.config.load.load", broken)
    code, _, err = run(capsys, "--role", "ps")
    assert code == 1
    assert err.count("\n") == 1
    assert err.startswith("error: unexpected ZeroDivisionError: oops (this is a bug")


def test_dry_run_prints_the_resolved_configuration(capsys, tmp_path):
    """--dry-run shows what would run: TOML for people, an object for programs."""
    (tmp_path / "text.txt").write_text("text enough for every part\n" * 1000)
    args = ["--role", "ps", "--set", "sync.every_s=5", "--name", "abc", "--run-dir", str(tmp_path)]
    args += ["--data", str(tmp_path), "--insecure", "--dry-run", "0.0.0.0:0"]
    code, out, _ = run(capsys, *args)
    assert code == 0
    assert "every_s = 5.0" in out
    code, out, _ = run(capsys, *args, "--json")
    made = json.loads(out)
    assert (made["run"]["name"], made["run"]["directory"]) == ("abc", str(tmp_path))
    assert made["listen"] == {"address": "tcp://0.0.0.0:0", "insecure": True}
    assert made["data"]["path"] == str(tmp_path)


def test_dry_run_resolves_defaults(capsys, monkeypatch):
    """0 and {name} must be shown as the values that a run would use."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    args = ["--role", "ps", "--name", "abc", "--set", "model.preset=1m", "--set", "model.layers=3"]
    code, out, _ = run(capsys, *args, "--dry-run", "--json")
    assert code == 0
    made = json.loads(out)
    assert made["run"]["directory"] == "runs/abc"
    sizes = {"preset": "1m", "layers": 3, "width": 128, "heads": 4, "context": 256}
    sizes |= {"tokenizer": "", "vocabulary": 0}
    assert made["model"] == {"family": "gpt", "sizes": "", **sizes}
    assert (made["data"]["shards"], made["train"]["threads"]) == (3, 7)
    code, out, _ = run(capsys, *args, "--dry-run")
    assert "threads = 7  # this machine's; each client counts its own\n" in out
    assert tomllib.loads(out) == made
    code, out, _ = run(capsys, *args, "--dry-run", "--set", "train.threads=2")
    assert "\nthreads = 2\n" in out


def test_dry_run_shows_and_checks_what_a_method_implies(capsys):
    """A run that a start refuses is refused here too."""
    args = ["--role", "ps", "--dry-run", "--set", "tune.method=lora", "--set", "tune.rule=bank"]
    code, out, _ = run(capsys, *args, "--json")
    assert code == 0
    made = json.loads(out)
    assert (made["sync"]["trigger"], made["outer"]["optimizer"]) == ("rounds", "average")
    code, _, err = run(capsys, *args, "--set", "sync.trigger=turns")
    assert (code, err.count("\n")) == (2, 1)
    assert "tune.rule = bank needs rounds" in err


def test_text_too_short_for_the_clients_names_the_option(capsys, tmp_path):
    """A user who typed --clients does not know data.shards."""
    (tmp_path / "text.txt").write_text("x" * 2000)
    code, _, err = run(capsys, "demo", "--data", str(tmp_path / "text.txt"), "--clients", "64")
    assert (code, err.count("\n")) == (2, 1)
    assert "or fewer --clients" in err
    assert "data.shards" not in err


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_own_rule_is_checked_before_anything_is_made(capsys, tmp_path, monkeypatch, more):
    """In one line, with the exit code of a wrong configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    args = ["--role", "ps", "--set", "outer.aggregation=mine.py:Mine", *more]
    code, _, err = run(capsys, *args)
    assert (code, err.count("\n")) == (2, 1)
    assert "outer.aggregation: mine.py:Mine: does not derive from fsl_async.store" in err
    assert not (tmp_path / "runs").exists()


def task_file(folder):
    """A task file with correct and wrong functions."""
    path = folder / "own.py"
    path.write_text("value = 3\ndef train(fed): ...\ndef two(fed, model): ...\ndef none(): ...\n")
    return path


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        (("--task", "own.py:tran"), "has no function 'tran'; it has train, two, none"),
        (("--task", "own.py:value"), "has no function 'value'"),
        (("--task", "own.py:two"), "two must take one argument, fed"),
        (("--task", "own.py:none"), "none must take one argument, fed"),
        (("--task", "broken.py:train"), "importing it raised ZeroDivisionError at line 1"),
        (("--data", "empty"), "holds no text files"),
        (("--data", "short.txt"), "has 5 bytes, fewer"),
    ],
)
def test_what_a_client_brings_is_checked_before_it_dials(capsys, tmp_path, monkeypatch, case, dry):
    """A typing error must be found without a parameter server; nothing listens at this address."""
    given, words = case
    monkeypatch.chdir(tmp_path)
    task_file(tmp_path)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("short")
    monkeypatch.setattr(
        "fsl_async.nodes.client.joining.ClientRuntime", lambda *_, **__: pytest.fail("it dialled")
    )
    line = ["--role", "client", "127.0.0.1:1", "--name", "a", *given]
    code, out, err = run(capsys, *line, *(["--dry-run"] if dry else []))
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert words in err


@pytest.mark.parametrize("role", [("client", "127.0.0.1:1"), ("ps",)])
def test_data_that_may_not_be_read_is_refused(capsys, tmp_path, monkeypatch, role):
    """Root may read all files, so the system's answer is simulated."""

    def denied(*_, **__):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    path = tmp_path / "secret.txt"
    path.write_text("x" * 5000)
    monkeypatch.setattr(Path, "open", denied)
    code, _, err = run(capsys, "--role", *role, "--name", "a", "--data", str(path), "--dry-run")
    assert (code, err) == (2, f"error: --data {path}: Permission denied\n")


def test_lines_to_paste_begin_as_the_program_was_called(capsys, monkeypatch, tmp_path):
    """In a clone fsl-node is not on PATH: help, errors and comments must have bin/fsl-node."""
    monkeypatch.setenv("FSL_NODE_CALLED_AS", "bin/fsl-node")
    monkeypatch.chdir(tmp_path)
    for line in ("--role ps --config no.toml", "ps", "fsl://a:1", "init --foo", "--rolle ps"):
        code, _, err = run(capsys, *line.split())
        assert code == 2
        assert "bin/fsl-node" in err, err
        assert " fsl-node" not in err, err
    assert run(capsys, "--help")[1].startswith("Usage: bin/fsl-node --role ps")
    run(capsys, "init")
    assert "#     bin/fsl-node --role ps --config fsl.toml\n" in (tmp_path / "fsl.toml").read_text()


def test_a_script_that_is_not_on_path_is_named_by_its_path(monkeypatch, tmp_path):
    """.venv/bin/fsl-node without an activated environment: the bare name is "command not found"."""
    monkeypatch.delenv("FSL_NODE_CALLED_AS", raising=False)
    monkeypatch.setattr("sys.argv", [".venv/bin/fsl-node"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == ".venv/bin/fsl-node"
    script = tmp_path / "fsl-node"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr("sys.argv", [str(script)])
    assert program() == "fsl-node"


def test_a_clone_installs_extras_by_its_own_program(monkeypatch, tmp_path):
    """`pip install` there would ignore the pinned versions, or find no published package."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("FSL_NODE_CALLED_AS", "/my clone/bin/fsl-node")
    assert to_install("hf,gguf") == "pip install 'fsl-async[hf,gguf]'"
    (tmp_path / STAMP).touch()
    assert to_install("hf") == "FSL_EXTRAS=hf '/my clone/bin/fsl-node' --version"
    assert f'stamp="$venv/{STAMP}"' in (REPOSITORY / "bin/bootstrap.sh").read_text()


def test_client_dry_run_and_options_behind_the_address(capsys, tmp_path):
    """Users append options to the pasted line, so they must be read behind the address too."""
    task = tmp_path / "train.py"
    task.write_text("def train(fed): ...\n")
    line = "--role client fsl://localhost:7100 --name a --dry-run --json --task"
    code, out, _ = run(capsys, *line.split(), f"{task}:train")
    assert code == 0
    assert json.loads(out) == {
        "role": "client",
        "server": "fsl://localhost:7100",
        "name": "a",
        "data": "",
        "task": f"{task}:train",
        "run_dir": "",
        "threads": threads_here(0),
        "allow": "deltas",
        "duty": "train",
    }


def test_help_imports_nothing_heavy():
    """--help answers in 0.3 s only while torch, ZeroMQ, NumPy and attrs stay unimported."""
    script = (
        "import sys; from fsl_async import cli; code = cli.main(['--help']); "
        "heavy = {'torch', 'zmq', 'numpy', 'attr', 'cattrs', 'asyncio', 'uvloop', 'msgpack',"
        " 'dataclasses', 'difflib', 'subprocess', 'traceback'} & set(sys.modules); "
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_closed_pipe_is_no_error():
    """`fsl-node --help | head -1` must not end in a BrokenPipeError traceback."""
    script = "import sys; from fsl_async import cli; sys.exit(cli.main(['--help']))"
    command = f'"{sys.executable}" -c "{script}" | true'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize("role", ["ps", "client"])
def test_data_that_is_a_pipe_is_refused_at_once(role, tmp_path, capsys):
    """Opening one would wait for a writer without a message."""
    os.mkfifo(tmp_path / "pipe")
    address = ["127.0.0.1:1"] if role == "client" else ["--dry-run"]
    code, _, err = run(capsys, "--role", role, *address, "--data", str(tmp_path / "pipe"))
    assert (code, err.count("\n")) == (2, 1)
    assert "neither a file nor a directory" in err


def test_text_too_short_for_any_model_names_no_context(tmp_path, capsys):
    """The run's context is unknown before the welcome, and 1 would be misleading."""
    (tmp_path / "short.txt").write_text("ab")
    short = str(tmp_path / "short.txt")
    code, _, err = run(capsys, "--role", "client", "127.0.0.1:1", "--data", short)
    assert code == 2
    assert "has 2 bytes" in err
    assert "context" not in err


def test_sim_shows_no_rows_of_what_it_does_not_simulate(capsys):
    """`loss first  -` looks like a failure."""
    code, out, _ = run(capsys, *["sim", "--clients", "2", "--hours", "0.5", "--faults", "none"])
    assert code == 0
    assert "loss" not in out
    assert "bytes raw" not in out
    assert "invariant violations" in out
