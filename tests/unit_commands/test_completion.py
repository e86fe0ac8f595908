"""`fsl-node completion`: the scripts are loaded by real shells, in which Tab is pressed."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fsl_async import cli
from fsl_async.commands import COMMANDS

PROGRAM = Path(sys.executable).with_name("fsl-node")
START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "-i"],
}
LOAD = {
    "bash": 'eval "$(fsl-node completion bash)"',
    "zsh": 'autoload -Uz compinit; compinit -D; eval "$(fsl-node completion zsh)"',
}
# What is typed before Tab, and what is there afterwards.
TYPED = {
    "fsl-node sta": "fsl-node status ",
    "fsl-node --role cl": "fsl-node --role client ",
    "fsl-node --role=rel": "fsl-node --role=relay ",
    "fsl-node --role relay --lis": "fsl-node --role relay --listen ",
    "fsl-node --set sync.quo": "fsl-node --set sync.quorum=",
    "fsl-node --set model.preset=12": "fsl-node --set model.preset=124m ",
    "fsl-node demo --preset 35": "fsl-node demo --preset 350m ",
    "fsl-node status runs/fi": "fsl-node status runs/first ",
    "bin/fsl-node evaluate ": "bin/fsl-node evaluate runs/first ",
    "fsl-node --role ps --config fs": "fsl-node --role ps --config fsl.toml ",
    "fsl-node --role client --data fs": "fsl-node --role client --data fsl.toml ",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a run, a settings file and bin/fsl-node, and the program on PATH."""
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/journal.jsonl").touch()
    (tmp_path / "runs/other").mkdir()
    (tmp_path / "fsl.toml").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/fsl-node").symlink_to(PROGRAM)
    monkeypatch.setenv("PATH", f"{PROGRAM.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completed(shell, lines):
    """Type each of `lines` and Tab into an interactive shell; yield what the line is then."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(START[shell][0], START[shell])
    try:
        os.write(terminal, f"PS1='READY '; {LOAD[shell]}; echo LOA''DED\n".encode())
        until(terminal, r"LOADED\s.*READY ()")
        for line in lines:
            # x shows where the next word would begin. Home, End, Enter: it is printed, not run.
            os.write(terminal, line.encode() + b"\tx\x01echo :\x05:\r")
            yield until(terminal, r"\n:([^\n]*)x:\r?\n.*READY ")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(pid, 0)


def until(terminal, pattern):
    """Return the group of `pattern` in what the shell writes, which has 20 s to come."""
    seen, ends_at = "", time.monotonic() + 20
    while not (found := re.search(pattern, seen, re.DOTALL)):
        assert time.monotonic() < ends_at, seen
        if select.select([terminal], [], [], 0.2)[0]:
            seen += os.read(terminal, 65536).decode(errors="replace")
    return found[1]


@pytest.mark.parametrize("shell", list(LOAD))
def test_tab_completes_in_a_real_shell(folder, shell):
    """The script must be loaded without an error, and Tab must complete."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    found = list(completed(shell, TYPED))
    assert found == list(TYPED.values())


def test_fish_completes(folder):
    """As above; `complete -C` prints what Tab would offer."""
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed")
    asked = "; ".join(f"echo -- (complete -C '{line}')[1]" for line in TYPED)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"fsl-node completion fish | source; {asked}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    offered = [line.partition("\t")[0].split(" ")[-1] for line in done.stdout.splitlines()]
    assert offered == [text.rstrip().rpartition(" ")[2] for text in TYPED.values()]
    assert done.stderr == ""


def offered(kind, text):
    """Values offered for the beginning `text`."""
    return [(item.type, item.value) for item in kind.shell_complete(None, None, text)]


def answered(line):
    """What the program answers to a shell, with the modules that it imports for it."""
    script = (
        "import sys; from fsl_async import cli\n"
        "try: cli.main([])\n"
        "finally: print(*({'torch', 'zmq', 'numpy', 'attr'} & set(sys.modules)))"
    )
    words = line.split(" ")
    environment = os.environ | {
        "_FSL_NODE_COMPLETE": "bash_complete",
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands_are_offered_without_importing_them():
    """Tab must answer at once."""
    assert answered("fsl-node ") == [*(f"plain,{name}" for name in COMMANDS), ""]


def test_with_json_the_script_is_in_an_object(capsys):
    """--json must go with every command."""
    assert cli.main(["completion", "bash", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert cli.main(["completion", "bash"]) == 0
    assert found == {"shell": "bash", "script": capsys.readouterr().out}
