"""AFA-CS: each version averages the newest delta of every client, new or not, from the spool."""

import json

import numpy as np
import pytest
from deltas import merged_of

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.errors import StoreError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.aggregation import Latest
from fsl_async.store.rules.outer import Average
from fsl_async.store.versions.checkpoint import UPDATE, WEIGHTS, flat_name
from fsl_codecs import CodecSpec

CHUNK = 32
"""Several chunks, the last one shorter."""

MODEL = Manifest.from_shapes([("w", (11, 9)), ("b", (7,))])
LIMIT = 4
OPTIONS = {
    "rule": Latest(), "reuse": LIMIT, "outer": Average(),
    "codec_down": CodecSpec("fp32"), "keep_versions": 2,
}  # fmt: skip
GAPS = [["a", "b", "c"], ["a"], ["b", "a"], ["a"], ["c"], ["a"], ["a"], ["b"]]
"""Who has a new delta in which version: b and c are seldom there."""


def noise(version, name):
    random = np.random.default_rng([version, *name.encode()])
    return random.standard_normal(MODEL.values).astype(np.float32)


class Play:
    """A run, and the closed form of its versions."""

    def __init__(self, run):
        self.run = run
        self.latest = {}  # client -> (version, key, weight)

    def start(self):
        """Make version 0."""
        self.run.start()
        self.expected = self.run.weights(0)
        return self

    def reused(self, version, sent):
        """What `version` uses again: within the limit, with a weight of its own."""
        return [
            merged_of(key, 0.5 * weight, staleness=version - 1 - key.base)
            for name, (_, key, weight) in sorted(self.latest.items())
            if name not in sent and version - 1 - key.base <= LIMIT
        ]

    def send(self, version, names):
        """Send deltas for `version`."""
        keys = [DeltaKey(name, 1, version - 1, version) for name in names]
        for key in keys:
            self.run.send(key, noise(version, key.client))
        return [merged_of(key, 1.0 / version) for key in keys]

    def commit(self, version, names):
        """Send deltas and make a version, whose weights must be those of the closed form."""
        merged = self.send(version, names)
        reused = self.reused(version, names)
        scale = 7.0 / (len(merged) + len(reused))
        made = self.run.store.commit(version, merged, scale, reused=reused)
        rows = {one.key.client: np.float32(one.weight) * noise(version, one.key.client)
                for one in merged}  # fmt: skip
        rows |= {one.key.client: np.float32(one.weight) * noise(one.key.sequence, one.key.client)
                 for one in reused}  # fmt: skip
        total = np.zeros(MODEL.values, np.float32)
        for name in sorted(rows):
            total = total + rows[name]
        self.expected = self.expected + -(total * np.float32(scale))
        self.latest |= {one.key.client: (version, one.key, one.weight) for one in merged}
        assert np.array_equal(self.run.weights(version), self.expected), "to the bit"
        return made

    def spooled(self):
        """The files in the spool, as client and sequence."""
        return sorted(path.name.split("@")[0] + path.name.split("@")[3].split(".")[0]
                      for path in (self.run.root / "spool").iterdir())  # fmt: skip


@pytest.fixture
def play(make_run):
    """Make runs that are played by the closed form."""
    return lambda name="run", **options: Play(make_run(name, MODEL, **OPTIONS | options)).start()


def test_each_version_is_the_closed_form(play):
    """In fp32, in the order of the clients' names, through restarts; the record has each use."""
    made = play(snapshot_thread=False)
    for version, names in enumerate(GAPS, start=1):
        made.commit(version, names)
        if version in (2, 5):
            recovered = made.run.open()
            held = {one.key.client: one for one in recovered.latest}
            assert {name: one.key for name, one in held.items()} == {
                name: key for name, (_, key, _) in made.latest.items() if version - key.base <= 4
            }
            assert all(one.weight == made.latest[name][2] for name, one in held.items())
    used = [sorted(one.key.client for one in record.reused) for record in made.run.store.records]
    assert used[-2:] == [["b", "c"], ["a", "c"]]
    facts = [
        json.loads(line) for line in (made.run.root / "ledger.jsonl").read_bytes().splitlines()
    ]
    versions = [fact for fact in facts if fact["fact"] == "version"]
    assert [len(fact.get("reused", ())) for fact in versions] == [0, 0, 2, 1, 2, 2, 2, 2, 2]
    audit = audit_run(made.run.root)
    assert audit.is_clean, audit.complaints()
    assert audit.tokens == made.run.store.tokens_total == 10 * sum(map(len, GAPS))


def test_the_spool_keeps_the_newest_delta_of_each_client(play):
    """It goes when a newer one takes its place in all kept versions, or when it is too old."""
    made = play(keep_versions=1)
    made.commit(1, ["a", "b"])
    for version in range(2, 6):
        made.commit(version, ["a"])
        # Two versions before the newest are kept, the second in case the first is damaged.
        first = max(1, version - 2)
        assert made.spooled() == [*(f"a{n}" for n in range(first, version + 1)), "b1"]
    assert [one.staleness for one in made.run.store.records[-1].reused] == [LIMIT]
    made.commit(6, ["a"])
    assert made.run.store.records[-1].reused == ()
    assert made.run.open().latest[0].key.client == "a"


@pytest.mark.parametrize(
    "again",
    [DeltaKey("b", 1, 0, 1), DeltaKey("a", 1, 1, 2), DeltaKey("z", 1, 0, 1)],
    ids=["older", "has a new one", "never merged"],
)
def test_only_the_newest_delta_of_another_client_is_used_again(play, again):
    """Anything else is refused, and the version can be made without it."""
    made = play()
    made.commit(1, ["a", "b"])
    made.commit(2, ["b", "a"])
    merged = made.send(3, ["a"])
    with pytest.raises(StoreError, match="cannot be used again in version 3"):
        made.run.store.commit(3, merged, 1.0, reused=[merged_of(again)])
    assert made.run.store.commit(3, merged, 1.0).version == 3


def test_a_rollback_uses_what_was_newest_then(play):
    """The deltas of the versions that are gone are pending; the ones before are used again."""
    made = play(keep_versions=4)
    for version, names in enumerate([["a", "b"], ["a"], ["b"], ["a"]], start=1):
        made.commit(version, names)
    digest = made.run.store.digest
    recovered = made.run.open(from_version=2)
    assert {one.key.sequence for one in recovered.pending} == {3, 4}
    assert {(one.key.client, one.key.sequence) for one in recovered.latest} == {("a", 2), ("b", 1)}
    recovered = made.run.open()
    assert {(one.key.client, one.key.sequence) for one in recovered.latest} == {("a", 2), ("b", 1)}
    store = made.run.store
    old = merged_of(DeltaKey("a", 1, 1, 2), 0.25, staleness=1)
    merged = [merged_of(DeltaKey("b", 1, 2, 3), 0.5), merged_of(DeltaKey("a", 1, 3, 4), 0.5)]
    with pytest.raises(StoreError, match="cannot be used again"):
        store.commit(3, merged, 1.0, reused=[old])
    assert store.commit(3, merged, 1.0).digest != digest
    assert audit_run(made.run.root).is_clean


@pytest.mark.parametrize("file", [WEIGHTS, UPDATE])
def test_a_damaged_file_is_made_again(play, file):
    """From the deltas merged and the ones used again, to the bit."""
    made = play()
    for version, names in enumerate(GAPS[:3], start=1):
        made.commit(version, names)
    digest = made.run.store.digest
    path = made.run.root / "checkpoints/v00000003" / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    made.run.close()
    path.write_bytes(data)
    assert made.run.open().digest == digest
    assert "version 3 " in made.run.store.notices[0]


def test_a_start_replays_versions_from_old_deltas(play):
    """Versions without a checkpoint are made again, and nothing is estimated."""
    made = play(snapshot_thread=False)
    for version, names in enumerate(GAPS[:4], start=1):
        made.commit(version, names)
    made.run.close()
    for version in (3, 4):
        for file in (WEIGHTS, flat_name("momentum"), "residual.safetensors"):
            (made.run.root / f"checkpoints/v0000000{version}" / file).unlink(missing_ok=True)
    before = made.run.settings
    made.run.open()
    assert np.array_equal(made.run.weights(4), made.expected)
    assert not any("begin again" in line for line in made.run.store.notices), before
    made.commit(5, GAPS[4])


@pytest.mark.parametrize("damage", ["gone", "altered"])
def test_a_lost_delta_is_not_used_again(play, damage):
    """A start says so; the run goes on without it."""
    made = play(keep_versions=1)
    for version, names in enumerate([["a", "b"], ["a"]], start=1):
        made.commit(version, names)
    made.run.close()
    (path,) = (made.run.root / "spool").glob("b@*")
    if damage == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert [one.key.client for one in made.run.open().latest] == ["a"]
    assert any("b/1/0/1 is not used again" in line for line in made.run.store.notices)
    del made.latest["b"]
    made.commit(3, ["a"])


def test_a_crash_at_any_call_of_a_commit_keeps_old_deltas(make_run, tmp_path):
    """The next start uses again what the version would have, and makes the same weights."""
    made = Play(make_run("run", MODEL, **OPTIONS | {"keep_versions": 1})).start()
    for version, names in enumerate(GAPS[:4], start=1):
        made.commit(version, names)
    run, before, merged = made.run, dict(made.latest), [merged_of(DeltaKey("c", 1, 4, 5), 0.2)]
    reused, expected = made.reused(5, ["c"]), made.expected

    def play(files):
        made.latest, made.expected = dict(before), expected
        run.open(files)
        files.faults.at += len(files.faults.calls)
        made.commit(5, GAPS[4])

    digests = []
    for recovered in run.deaths(play, powers=(None, "all")):
        if recovered.version == 4:
            assert {one.key.client for one in recovered.latest} == {"a", "b", "c"}
            if not recovered.pending:
                run.send(merged[0].key, noise(5, "c"))
            run.store.commit(5, merged, 7.0 / 3, reused=reused)
        digests.append(run.store.digest)
        assert {one.key.client for one in run.open(run.files).latest} == {"a", "b", "c"}
        run.files.disk.write_to(tmp_path, run.root)
        assert audit_run(tmp_path).is_clean
    assert len(digests) > 20
    assert len(set(digests)) == 1
