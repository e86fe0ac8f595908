"""Which part of the data a client gets."""

from fsl_async.config.load import load
from fsl_async.nodes.ps.node import run_facts

ROSTER = "north=tcp://10.0.0.1:7100, south=tcp://10.0.0.2:7100"


def test_groups_have_parts_that_follow_each_other():
    """Two groups of three clients: no two clients of them train on one part."""
    facts = {
        name: run_facts(
            "r", load(None, [f"ring.roster={ROSTER}", f"run.name={name}", "sync.clients=3"])
        )
        for name in ("north", "south")
    }
    parts = [facts[name].part_of(shard) for name in ("north", "south") for shard in range(3)]
    assert parts == list(range(6))
    assert facts["south"].groups * facts["south"].shards == 6
    south = facts["south"]
    assert [south.shard_of(part) for part in (-1, 2, 3, 5, 6)] == [-1, -1, 0, 2, -1]


def test_a_run_without_groups_has_one():
    """The shard is the part."""
    facts = run_facts("r", load(None, ["sync.clients=3"]))
    assert [facts.part_of(shard) for shard in range(3)] == [0, 1, 2]
    assert facts.groups == 1
