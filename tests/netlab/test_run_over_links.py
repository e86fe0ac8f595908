"""A run over the laboratory's links, one of which is cut and healed: real processes, real training.

Journal and ledger are checked.
"""

import asyncio
import os

import pytest
from attrs import evolve

from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.observe.journal import JournalReader
from fsl_async.observe.ledger_audit import JOURNAL, audit_run
from fsl_async.process.stopper import Stopper
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.tools.demo.places import Sites
from fsl_async.tools.demo.pretrain import pretrain
from fsl_async.tools.demo.runner import Runner
from fsl_async.tools.demo.scenario import Choices, Fault, Stage

LONGEST_S = 50 * float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
ROUNDED_S = 0.001
"""Resolution of the times in the ledger."""
CUT_OFF, OTHER = "client-1", "client-2"


def lines_of(run_dir):
    """Return the lines of the parameter server's journal so far."""
    path = run_dir / JOURNAL
    return list(JournalReader(path).read()) if path.exists() else []


def named(lines, name, **fields):
    """Return the lines of one type with these fields."""
    wanted = fields.items()
    return [line for line in lines if line["type"] == name and wanted <= line.items()]


def versions_of(run_dir):
    """Return the ledger's lines of versions, without version 0, which merges nothing."""
    path = run_dir / "ledger.jsonl"
    facts = map(from_checksummed, path.read_bytes().splitlines()) if path.exists() else ()
    return [fact for fact in facts if fact and fact["fact"] == "version" and fact["merged"]]


def has_part(run_dir, name, after=0):
    """Return whether a version after the first `after` ones holds a delta of a client."""
    entries = [entry for fact in versions_of(run_dir)[after:] for entry in fact["merged"]]
    return any(DeltaKey.parse(entry["key"]).client == name for entry in entries)


@pytest.mark.slow
def test_a_link_is_cut_and_healed_while_a_run_goes_on(lab, tmp_path):
    """A cut longer than a session's expiry: every sync completes, the client returns without a
    restart, nothing is lost or doubled.
    """
    lab.set("all", "campus")
    run_dir, made = tmp_path / "run", []

    def acting(act):
        """A fault; it keeps the number of versions made before."""

        def what(_, name):
            made.append(len(versions_of(run_dir)))
            act(name)
            return f"{act.__name__} {name}"

        return what

    def is_missed(_):
        left = made and named(lines_of(run_dir), "client_left", peer=CUT_OFF)
        return left and len(versions_of(run_dir)) > made[0] + 1

    places = Sites(lab)
    chosen = Choices(clients=2, format="e4m3", every_s=2.0, seed=3, run_dir=run_dir, places=places)
    demo = pretrain(chosen)
    # It merges what was trained before the cut however late it comes.
    patient = (*demo.servers[0].options, "--set", "sync.max_staleness=100")
    demo = evolve(
        demo,
        nodes=[evolve(demo.servers[0], options=patient), *demo.clients],
        faults=[
            Fault(CUT_OFF, lambda _: has_part(run_dir, CUT_OFF), acting(lab.cut)),
            Fault(CUT_OFF, is_missed, acting(lab.heal)),
        ],
        is_over=lambda run: (
            (len(made) == 2 and has_part(run_dir, CUT_OFF, made[1])) or run.elapsed() > LONGEST_S
        ),
    )
    played = asyncio.run(Runner(demo, Stage(print, Stopper()), lambda *_: None).play())
    assert (played.problems, played.late) == ([], [])
    check_run(run_dir, *(fault.begun for fault in played.faults))


def check_run(run_dir, cut_at, healed_at):
    """Check the run by its ledger and its journals."""
    audit = audit_run(run_dir)
    assert audit.complaints() == []
    assert (audit.pending, audit.quarantined) == (0, 0)
    assert audit.merged == audit.acknowledged
    lines = lines_of(run_dir)
    made = named(lines, "version_committed")
    assert [line["version"] for line in made] == list(range(audit.versions + 1))
    calls = [line for line in named(lines, "send") if line["message"]["type"] == "call/1"]
    assert sorted({line["message"]["round"] for line in calls}) == list(range(audit.versions)), (
        "every sync that was called was completed"
    )

    # There are versions before, during and after the cut; during it this client's session expired,
    # and no other.
    times = [fact["at"] for fact in versions_of(run_dir)]
    assert times[0] < cut_at + ROUNDED_S
    assert sum(cut_at < t < healed_at + ROUNDED_S for t in times) > 1
    assert sum(t > healed_at for t in times) > 1
    left = [line for line in named(lines, "client_left") if line["t"] < healed_at]
    assert [(line["peer"], line["reason"]) for line in left] == [(CUT_OFF, "expired")]
    assert cut_at < left[0]["t"]

    # It returned as the same process, and each delta was merged once.
    keys = [
        DeltaKey.parse(entry["key"]) for fact in versions_of(run_dir) for entry in fact["merged"]
    ]
    assert sorted({key.client for key in keys}) == [CUT_OFF, OTHER]
    assert len({(key.client, key.incarnation) for key in keys}) == 2
    for name in (CUT_OFF, OTHER):
        sequences = [key.sequence for key in keys if key.client == name]
        assert sequences == list(range(1, len(sequences) + 1))
