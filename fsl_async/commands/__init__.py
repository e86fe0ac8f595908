"""The commands of `fsl-node`: one file each, imported only when it is used.

A command `name` is a click command called `command` in the file `name.py`, and one line here. It
has a --json option, prints through `output.Output`, raises `fsl_async.errors.FslError` for errors
that the user can act on, and may return an exit code.
"""

from __future__ import annotations

COMMANDS: dict[str, str] = {
    "audit": "Attack the delta that this site would send, before it joins a run.",
    "bench": "Measure codec and transport on this machine, and compare them with its limits.",
    "chaos": "Inject faults into a running run, and report what they cost.",
    "compare": "Train with several methods of split learning, side by side.",
    "completion": "Print the script that completes this program in bash, zsh or fish.",
    "decay": "Let the learning rates of a running run fall from now on.",
    "demo": "Show a whole run on this machine in under a minute.",
    "doctor": "Report what this machine and this install have, and lack.",
    "evaluate": "Evaluate a run's versions on held-out data, also while it goes on.",
    "export": "Write a run's model as a folder for other programs: PEFT, Hugging Face.",
    "generate": "Print what a run's model, or an exported one, writes.",
    "init": "Write a commented configuration file.",
    "keys": "Make this node's key; trust, list and revoke keys of others.",
    "plan": "Compute what a method would cost: bytes, seconds, memory.",
    "quarantine": "Take an accepted delta out of a stopped run.",
    "sim": "Simulate days of a run in seconds, to plan and to check.",
    "status": "Show what a run does or did, from its directory.",
}
