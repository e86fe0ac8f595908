"""What a client prints while it trains."""

import pytest
import torch

from fsl_async import cli
from fsl_async.commands import client
from fsl_async.config.load import cores, from_wire, to_wire
from fsl_async.config.settings import Config
from fsl_async.learn.client.context import ClientContext
from fsl_async.nodes.client.client_node import progress_words
from fsl_async.nodes.client.gang import options_from_wire, options_to_wire
from fsl_async.nodes.client.joining import context_of, start_line
from fsl_async.nodes.client.parts import ClientOptions, ClientParts, Membership
from fsl_async.nodes.wire import Welcome


@pytest.mark.parametrize(
    ("progress", "words"),
    [
        (
            {"step": 1340, "tokens": 9, "tokens_per_s": 4000.4, "loss": 2.7133},
            "step 1,340, loss 2.71 (running mean), 4,000 tokens/s",
        ),
        ({"step": 2, "tokens": 9, "tokens_per_s": 0.0}, "step 2"),
    ],
)
def test_progress_in_words(progress, words):
    """A task need not report a loss, and in the first seconds there is no speed."""
    assert progress_words(progress) == words


@pytest.mark.parametrize(
    "case",
    [
        (0, None, None, cores(), "give each client --threads N"),
        (0, None, "3", 3, "OMP_NUM_THREADS"),
        (2, None, "3", 2, "the run's train.threads"),
        (2, 1, "3", 1, "--threads"),
    ],
)
def test_the_start_line_has_the_threads_and_sets_them(case, monkeypatch):
    """Two clients that take all cores slow each other down: the line must have the number and the
    setting.
    """
    setting, option, variable, count, why = case
    if variable is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    config = {"train": {"threads": setting if option is None else option}}
    before = torch.get_num_threads()
    try:
        line = start_line(ClientContext("site-a", config=config), option)
        assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert line.startswith(f"site-a trains on cpu with {count} thread")
    assert why in line


def test_a_task_sees_what_was_checked_of_a_welcome():
    """Unknown tables and keys are not checked, so a task must not get them: it might print them."""
    tables = to_wire(Config())
    tables |= {"\x1b[2J": {"a": 1}, "train": {**tables["train"], "batch": 7, "\x1b": "\n"}}
    member = Membership(Welcome("r", 0, 1, tables), from_wire(tables))
    place = context_of(ClientOptions("h:1", "a", data="here.txt", device="cpu"), member, print)
    plain = to_wire(Config())
    assert place.config["train"] == {**plain["train"], "batch": 7}
    assert place.config["data"] == {**plain["data"], "path": "here.txt"}
    assert set(place.config) == set(plain)
    place = context_of(ClientOptions("h:1", "a", data="x", columns="text=BODY"), member, print)
    assert place.config["data"]["columns"] == "text=BODY", "a site's own choice reaches its task"


@pytest.mark.parametrize(("flags", "refuses"), [((), True), (("--accept-rollback",), False)])
def test_the_flag_decides_over_the_site_file(flags, refuses, tmp_path, monkeypatch, capsys):
    """site.toml asks for a person's decision: the flag is that. A rank's node gets the same."""
    tmp_path.chmod(0o700)
    (tmp_path / "site.toml").write_text('allow = ["deltas"]\naccept_rollback = false\n')
    (tmp_path / "task.py").write_text("def train(fed): pass\n")
    monkeypatch.setenv("FSL_KEYS", str(tmp_path))
    given = []
    monkeypatch.setattr(client, "_join", lambda options, *_, **__: given.append(options) or {})
    task = f"{tmp_path / 'task.py'}:train"
    args = ["--role", "client", "--name", "a", "--task", task, *flags, "127.0.0.1:9"]
    assert cli.main(args) == 0, capsys.readouterr().err
    (options,) = given
    assert options.policy.refuses_rollback == refuses
    assert options_from_wire(options_to_wire(options)).policy.refuses_rollback == refuses
    parts = ClientParts(options, None, None, None, print)
    assert parts.machine.version_sync.refuses_rollback == refuses
