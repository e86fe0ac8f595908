"""docs/guides/fine-tune-three-hospitals.md, followed with its own commands."""

import json
import os
import re
import shlex
import signal
import time
from pathlib import Path

import pytest
import torch
from ports import free_ports
from tiny_base import write_bert

from fsl_async import cli

pytestmark = pytest.mark.slow

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "fine-tune-three-hospitals.md"
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
WORDS = {"routine": "repeat prescription no complaints", "urgent": "chest pain since two hours"}


def commands():
    """Return each command of the guide's blocks, as words."""
    blocks = re.findall(r"```\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("bin/")]


def records(path, count, labels=("routine", "urgent")):
    """Write records of the guide's shape, as its suffix says."""
    rows = [
        {"text": f"Patient {number}: {WORDS[label]}", "label": label}
        for number in range(count)
        for label in labels
    ]
    if path.suffix == ".csv":
        lines = ["text,label", *(f"{row['text']},{row['label']}" for row in rows)]
    else:
        lines = [json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n")


class People:
    """The operator and three hospitals: each has a folder, and keys in it."""

    def __init__(self, folder, starter, monkeypatch, capsys):
        self.folder, self.nodes = folder, {}
        self.starter, self.monkeypatch, self.capsys = starter, monkeypatch, capsys
        self.changes = {}
        """Words of the guide that are another place here."""

    def run(self, who, words):
        """Run a command to its end, in this process; returns its output."""
        place = self.folder / who
        place.mkdir(exist_ok=True)
        with self.monkeypatch.context() as patch:
            patch.chdir(place)
            patch.setenv("FSL_KEYS", str(place / "keys"))
            code = cli.main([self.changes.get(word, word) for word in words])
        shown = self.capsys.readouterr()
        assert code == 0, (words, shown)
        return shown.out

    def start(self, who, words):
        """Start a node with the keys of its place; its output goes to a file."""
        given = [self.changes.get(word, word) for word in words]
        place = self.folder / who
        with (self.folder / f"{who}.log").open("w") as out:
            self.nodes[who] = self.starter.start_into(
                out.fileno(), [*given, "--keys", place / "keys"], place
            )

    def wait_for(self, who, pattern):
        """Wait for a pattern in a node's output; returns its first group."""
        give_up_at = time.monotonic() + 60 * UNIT_S
        while time.monotonic() < give_up_at:
            found = re.search(pattern, self.text(who))
            if found:
                return found[1]
            time.sleep(0.2)
        raise AssertionError(f"{pattern}: never\n{self.text(who)}")

    def text(self, who):
        """Return a node's output so far."""
        return (self.folder / f"{who}.log").read_text()

    def close(self):
        """End the nodes."""
        for process in self.nodes.values():
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_guide_from_its_first_line_to_its_exported_model(
    tmp_path, starter, monkeypatch, capsys
):
    """The guide's commands, with keys, give a classifier that plain peft loads."""
    (port,) = free_ports(1)
    people = People(tmp_path, starter, monkeypatch, capsys)
    try:
        _follow(people, tmp_path, port)
    finally:
        people.close()


def _follow(people, folder, port):
    keys, ps, *clients, status, export, evaluate, _private = [
        words for words in commands() if words[0] != "demo"
    ][:9]
    assert keys == ["keys", "new"]
    base = write_bert(folder / "base")
    people.changes = {
        "MODEL": str(base),
        "0.0.0.0:7100": f"127.0.0.1:{port}",
        "6-11": "1",  # of two blocks
    }
    people.run("operator", keys)
    # A loopback address is plain unless keys are named, as `start` does.
    people.start("operator", ps)
    address = people.wait_for("operator", r"(fsl://\S+key=[^\s']+)")
    people.changes["fsl://ps.example.org:7100?key=..."] = address
    assert "without effect" not in people.text("operator")
    sites = [words[words.index("--name") + 1] for words in clients]
    assert sites == ["hospital-a", "hospital-b", "hospital-c"]
    began = time.monotonic()
    for site, words in zip(sites, clients, strict=True):
        people.run(site, keys)
        line = people.run(site, ["keys", "pub"]).strip()
        people.run("operator", ["keys", "trust", line, "--name", site])
        records(folder / site / words[words.index("--data") + 1], 20)
        people.start(site, words)
    for who in ("operator", *sites):
        code = people.nodes[who].wait(timeout=80 * UNIT_S)
        assert code == 0, (who, people.text(who))
    assert time.monotonic() - began < 300, "the guide's run takes less than five minutes"
    shown = people.run("operator", status)
    assert all(site in shown for site in sites)
    people.run("operator", export)
    records(folder / "operator" / "test.jsonl", 10)
    assert "accuracy" in people.run("operator", evaluate)
    assert _accuracy(base, folder / "operator" / "adapter") > 0.9


def _accuracy(base, adapter):
    """Return the share of right answers of the exported adapter, loaded by peft alone."""
    import peft
    import transformers

    config = transformers.AutoConfig.from_pretrained(base, num_labels=2)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, config=config)
    model = peft.PeftModel.from_pretrained(model, adapter).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    right = 0
    for number, label in enumerate(sorted(WORDS)):
        given = tokenizer(f"Patient 77: {WORDS[label]}", return_tensors="pt")
        given.pop("token_type_ids", None)
        with torch.no_grad():
            right += int(model(**given).logits.argmax()) == number
    return right / len(WORDS)
