"""Options, reports and errors that a node and its ranks pass each other."""

import os

import pytest

from fsl_async.config.load import load, to_wire
from fsl_async.config.site_policy import SitePolicy
from fsl_async.errors import TaskError, TaskRaisedError, UsageError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.gang.link import ERRORS, Place
from fsl_async.nodes.client import gang_joining, gang_rank
from fsl_async.nodes.client.gang import checked, last_error, packed, unpacked
from fsl_async.nodes.client.gang_shell import GangMeter
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.nodes.wire import Welcome


def member(*overrides):
    """A welcome of a run with these settings."""
    config = load(None, overrides)
    return Membership(Welcome("run", 1, 3, to_wire(config)), config)


def test_a_second_join_of_ranks_is_refused(monkeypatch):
    """It could meet the node of the first one, which is about to end."""
    dialed = []

    def dial(name, _):
        dialed.append(name)
        raise gang_joining.NodeLostError("this rank's node does not answer")

    monkeypatch.setattr(gang_joining, "_dial", dial)
    monkeypatch.setattr(gang_joining, "_joined", [])
    given = ClientOptions("127.0.0.1:7100", "a"), Place(0, 2, 0, 0, 2), lambda *_: None, print
    with pytest.raises(gang_joining.NodeLostError):
        gang_joining.join_ranks(*given)
    with pytest.raises(TaskError, match="start another torchrun"):
        gang_joining.join_ranks(*given)
    assert len(dialed) == 1


def test_options_and_welcome_arrive_as_they_were():
    """A rank makes its task's context from them, as a client of one process does."""
    options = ClientOptions(
        "127.0.0.1:7100",
        "a",
        task="/t.py:train",
        threads=3,
        model="m.py:f",
        rank=4,
        policy=SitePolicy(frozenset({"deltas", "metrics"})),
    )
    assert unpacked(packed(options, member())) == (options, member())


def test_runs_of_single_processes_are_refused():
    """Split learning, and steps of zeroth order."""
    with pytest.raises(UsageError, match="one process"):
        checked(ClientOptions("s", "a", order="zeroth"), member())
    checked(ClientOptions("s", "a"), member())


@pytest.mark.parametrize(
    ("sharding", "parts"), [("disjoint", [(2, 6), (3, 6)]), ("local", [(0, 2), (1, 2)])]
)
def test_ranks_share_the_part_of_their_client(sharding, parts):
    """No two ranks of a run draw from the same data."""
    config = {"data": {"sharding": sharding}}
    made = [
        Fed(
            training_of_none(),
            ClientContext("c", config=config, shard_index=1, shard_count=3, rank=rank, ranks=2),
        ).part
        for rank in range(2)
    ]
    assert made == parts


def training_of_none():
    """Something with a meter."""
    return type("Training", (), {"meter": None})()


def test_reports_of_all_gangs_count():
    """Those of a gang that is gone too, but for what it had not sent."""
    meter = GangMeter()
    meter.reported({"step": 5.0, "tokens": 80.0, "tokens_per_s": 7.0, "loss": 1.5})
    found = {"step": 5.0, "tokens": 80.0, "tokens_per_s": 7.0}
    assert meter.totals() == found
    assert meter.report() == {**found, "loss": 1.5}
    meter.sent_tokens = 60
    assert meter.lost() == 20
    meter.reported({"step": 2.0, "tokens": 16.0, "not_finite": 1.0})
    assert meter.totals() == {"step": 7, "tokens": 96, "tokens_per_s": 0.0, "not_finite": 1.0}


def test_the_first_error_of_the_last_start_is_why_ranks_ended(monkeypatch):
    """Ranks that lose the one that died fail later, of errors that name no cause."""
    with os.fdopen(os.memfd_create("errors"), "rb") as kept:
        monkeypatch.setenv(ERRORS, f"/proc/{os.getpid()}/fd/{kept.fileno()}")
        for start, rank, error in (
            ("0", "0", ValueError("old")),
            ("1", "3", TaskRaisedError("your task raised\nit", "")),
            ("1", "0", RuntimeError("connection closed by peer")),
        ):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", start)
            monkeypatch.setenv("RANK", rank)
            gang_rank._keep(error)
        found = kept.read().decode()
    assert last_error(found) == "rank 3: your task raised; it"
    assert last_error(found.splitlines()[0]) == "rank 0: ValueError: old"
    assert last_error("") == ""
    monkeypatch.delenv(ERRORS)
    gang_rank._keep(ValueError("a rank of the user's torchrun"))  # nowhere to write
