"""The command line as a user meets it: one line for every mistake, help without heavy imports."""

import json
import subprocess
import sys

import pytest

from fsl_async import cli
from fsl_async.commands import COMMANDS


def run(capsys, *args):
    code = cli.main(args)
    out, err = capsys.readouterr()
    return code, out, err


GOLDEN = [
    ("--role relay", "--role relay is not in this version; use --role ps or --role client"),
    ("--role server a:1", "--role server is not in this version; use --role ps or --role client"),
    ("--role foo", "--role 'foo' is unknown; use --role ps or --role client"),
    ("--rolle ps", "no such option '--rolle'. Did you mean '--role'? (see fsl-node --help)"),
    (
        "--config fsl.toml",
        f"say what this node is, --role ps or --role client, or give a command ({', '.join(COMMANDS)})",
    ),
    ("fsl://a:1", "to join the run at fsl://a:1: fsl-node --role client fsl://a:1"),
    ("initt", "no command 'initt'; did you mean init?"),
    ("node", f"no command 'node'; commands: {', '.join(COMMANDS)}"),
    ("ps", "a role is an option: fsl-node --role ps"),
    ("init --foo", "no such option '--foo'. Did you mean '--force'? (see fsl-node init --help)"),
    ("--role ps a:1 b", "got unexpected extra argument (b) (see fsl-node --help)"),
    (
        "--role client",
        "which server? The server prints the line, like: fsl-node --role client fsl://ps.example.org:7100",
    ),
    ("--role client foo", "foo: no port; write one like fsl://ps.example.org:7100"),
    (
        "--role client a:1 --config x",
        "--config is the parameter server's; a client gets the run's configuration from it",
    ),
    (
        "--role client a:1 --set sync.every_s=3",
        "--set is the parameter server's; a client gets the run's configuration from it",
    ),
    (
        "--role client a:1 --from-version 0",
        "--from-version is the parameter server's; a client gets the run's configuration from it",
    ),
    (
        "--role client fsl://a:1?key=k",
        "encryption is not in this version: remove ?key=... and use an SSH tunnel or a VPN",
    ),
    (
        "--role client a:1 --name a/b",
        "--name 'a/b': must be 1 to 64 letters, digits, dots, dashes or underscores",
    ),
    ("--role client a:1 --task nothere.py:f", "--task nothere.py:f: no such file nothere.py"),
    (
        "--role client a:1 --task nothere",
        "--task nothere: write it as file.py:function, for example train.py:train",
    ),
    ("--role client a:1 --data nothere", "--data nothere: no such file or directory"),
    ("--role ps --data nothere", "--data nothere: no such file or directory"),
    ("--role ps --config no.toml", "no.toml: no such file; `fsl-node init no.toml` writes one"),
    (
        "--role ps --set sync.evry_s=3",
        "--set: sync.evry_s: unknown key, did you mean sync.every_s?",
    ),
    (
        "--role ps 0.0.0.0:7100",
        (
            "--set: listen.address: tcp://0.0.0.0:7100 can be reached by other machines, and encryption is not in this "
            "version; listen at 127.0.0.1 and use an SSH tunnel or a VPN, or accept it with --insecure"
        ),
    ),
]


@pytest.mark.parametrize(("line", "message"), GOLDEN)
def test_every_mistake_is_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, line, message):
    """Golden lines: each says what is wrong and what to do, without a traceback."""
    monkeypatch.chdir(tmp_path)
    assert run(capsys, *line.split()) == (2, "", f"error: {message}\n")


def test_with_json_a_mistake_is_one_object(capsys):
    """`--json` holds for errors too, also for those found while reading the command line."""
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
    assert run(capsys, "--debug", "--role", "client", "a:1", "--name", "b", "--dry-run")[0] == 0


@pytest.mark.parametrize("args", [["--help"], [], ["--role", "ps", "--help"], ["--role", "--help"]])
def test_help_lists_roles_commands_and_exit_codes(capsys, args):
    """Whoever asks for help gets all of it, whatever else is on the line."""
    code, out, err = run(capsys, *args)
    assert (code, err) == (0, "")
    assert out.startswith("Usage: fsl-node --role ps")
    for word in ("--from-version", "--dry-run", "--debug", "130", *COMMANDS):
        assert word in out


def test_every_listed_command_exists_and_has_json(capsys):
    """A line in COMMANDS without a command, or one without --json, would be a broken promise."""
    for name in COMMANDS:
        code, out, _ = run(capsys, name, "--help")
        assert code == 0, name
        assert "--json" in out, name


def test_version(capsys):
    """Bug reports start with it."""
    code, out, _ = run(capsys, "--version")
    assert code == 0
    assert out.startswith("fsl-node 0.")


def test_a_bug_is_called_a_bug(capsys, monkeypatch):
    """An unexpected exception exits 1 with advice, and is still one line."""

    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("fsl_async.config.load", broken)
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


def test_client_dry_run_and_options_behind_the_address(capsys, tmp_path):
    """Users append options to the pasted line, so they must be read behind the address too."""
    task = tmp_path / "train.py"
    task.write_text("def train(fed): ...\n")
    args = [
        "--role",
        "client",
        "fsl://ps:7100",
        "--name",
        "a",
        "--task",
        f"{task}:train",
        "--dry-run",
    ]
    code, out, _ = run(capsys, *args, "--json")
    assert code == 0
    assert json.loads(out) == {
        "role": "client",
        "server": "fsl://ps:7100",
        "name": "a",
        "data": "",
        "task": f"{task}:train",
        "run_dir": "",
    }


def test_help_imports_nothing_heavy():
    """--help answers in 0.3 s only while torch, ZeroMQ, NumPy and cattrs stay unimported."""
    script = (
        "import sys; from fsl_async import cli; code = cli.main(['--help']); "
        "heavy = {'torch', 'zmq', 'numpy', 'cattrs', 'asyncio', 'uvloop', 'msgpack', 'rich'} & set(sys.modules); "
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
