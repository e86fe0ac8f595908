"""Sites that lie in a run that merges products: what is quarantined, and how a run gets out."""

import shlex

import numpy as np
import pytest
from adapter_runs import PRODUCT_RULES, RANK
from attrs import evolve
from click.testing import CliRunner
from deltas import merged_of, stored_of

from fsl_async.commands.quarantine import command
from fsl_async.files.files import Files
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.book.records import VersionRecord, way_out
from fsl_async.store.errors import StoreError
from fsl_async.store.merge import merge_products
from fsl_async.store.versions.checkpoint import WEIGHTS

CHUNK = 64
"""Modules that begin and end within chunks, and lie across several."""

HONEST = dict.fromkeys("abc", RANK)


LIE = DeltaKey("d", 1, 0, 1)


def lie(made, value, key=LIE):
    """Spool a delta of one size everywhere, also in factors that the rule does not train."""
    noise = np.random.default_rng(key.sequence).standard_normal(made.manifest.values)
    return made.send(key, np.float32(value) * np.sign(noise, dtype=np.float32))


@pytest.mark.parametrize("rule", PRODUCT_RULES)
@pytest.mark.parametrize("value", [3e18, 1e18, 1e6])
def test_a_delta_that_products_would_square_is_quarantined(tuning, rule, value):
    """The round goes on without it, and so do later ones, as if it had not been there."""
    made, other = tuning(rule, "lied to"), tuning(rule, "honest")
    for one in (made, other):
        one.start()
    assert "lets products grow above 1e+09 in 'm." in lie(made, value).problem
    assert made.store.known(LIE) == "quarantined"
    for _ in range(2):
        assert made.round(HONEST).digest == other.round(HONEST).digest
    assert [path.name for path in (made.run.root / "quarantine").iterdir()] == ["d@1@0@1.frames"]


def test_deltas_of_a_client_add_up(tuning):
    """Each is below the limit alone; in a merge they are one site."""
    made = tuning()
    made.start()
    values = np.zeros(made.manifest.values, np.float32)
    values[0] = 2e4
    assert made.send(DeltaKey("d", 1, 0, 1), values).problem is None
    assert "lets products grow" in made.send(DeltaKey("d", 1, 0, 2), values).problem
    assert made.send(DeltaKey("c", 1, 0, 1), values).problem is None


def test_a_version_that_is_too_large_itself_is_named(tuning):
    """Another client's quarantine would not help: the message has the one command that does."""
    made = tuning("flexlora")
    made.start()
    key = DeltaKey("d", 1, 0, 1)
    values = np.zeros(made.manifest.values, np.float32)
    values[[0, RANK * 11]] = 2.2e4
    made.send(key, values)
    made.merge([key])
    before = made.vectors.named[WEIGHTS].copy()
    made.vectors.named[WEIGHTS] *= 3  # the model began like that
    problem = made.send(DeltaKey("a", 1, 1, 2), made.delta(2, "a")).problem
    made.vectors.named[WEIGHTS][:] = before
    assert problem.startswith("products of version 1 itself are above 1e+09 in 'm.")
    assert problem.endswith(f"quarantine {made.run.root} --client d --from-version 0")


def invoke(text):
    """Run the command that a message names; return what it prints."""
    words = shlex.split(text.partition("fsl-node quarantine ")[2])
    found = CliRunner().invoke(command, words, catch_exceptions=False, standalone_mode=False)
    if found.exception:
        raise found.exception
    return found.stdout


def go_on(made, recovered):
    """Merge what waits, as the parameter server does after a start, and two more rounds."""
    keys = [one.key for one in recovered.pending]
    if keys:
        made.merge(keys)
    for version in (2, 3):
        keys = [DeltaKey(name, 1, version - 1, version + 1) for name in HONEST]
        for key in keys:
            made.send(key, made.delta(version, key.client))
        made.merge(keys)


@pytest.mark.parametrize("rule", ["bank", "fedsvd", "flexlora"])
def test_a_destroyed_run_goes_on_after_the_named_command(tuning, rule, monkeypatch):
    """To the bit as if the liar had not been there; it is in quarantine, and nothing is lost."""
    monkeypatch.setattr(merge_products, "LARGEST_PRODUCT", np.inf)
    made, other = tuning(rule, "lied to"), tuning(rule, "honest")
    for one in (made, other):
        one.start()
    keys = [DeltaKey(name, 1, 0, 1) for name in HONEST]
    for key in keys:
        for one in (made, other):
            one.send(key, one.delta(1, key.client))
    lie(made, 3e18)
    made.merge([*keys, LIE])
    assert made.store.records[-1].update_norm > 1e30
    last = DeltaKey("d", 1, 1, 2)  # another one of the liar, and one that it has poisoned
    late = DeltaKey("a", 1, 1, 2)
    for key in (last, late):
        lie(made, 3e18, key)
    with pytest.raises(StoreError, match="version 1 is destroyed: stop the parameter") as caught:
        made.merge([last, late])
    with pytest.raises(Exception, match="another process uses"):
        invoke(str(caught.value))
    made.run.close()
    assert "3 deltas are pending again, 0 deltas are gone, 3 deltas are quarantined" in invoke(
        str(caught.value)
    )
    monkeypatch.undo()
    monkeypatch.setattr("fsl_async.store.model.manifest.CHUNK_VALUES", 64)
    for one in (made, other):
        recovered = one.run.open()
        assert {delta.key for delta in recovered.pending} == set(keys)
        go_on(one, recovered)
    assert made.store.digest == other.store.digest
    assert [made.store.known(key) for key in (LIE, last, late)] == ["quarantined"] * 3
    made.run.close()
    assert audit_run(made.run.root).is_clean
    assert audit_run(made.run.root).quarantined == 3


class Dies(Files):
    """A disk whose process dies at the n-th changing call, before or after it."""

    def __init__(self, at, *, after):
        self.left, self.after = at, after

    def _call(self, act, *arguments):
        self.left -= 1
        if self.left or self.after:
            act(*arguments)
        if not self.left:
            raise SystemExit("killed")

    def write(self, descriptor, data, offset):
        """Count."""
        self._call(super().write, descriptor, data, offset)

    def sync(self, descriptor):
        """Count."""
        self._call(lambda: None)

    def rename(self, source, target):
        """Count."""
        self._call(super().rename, source, target)


@pytest.mark.parametrize("after", [False, True])
def test_a_crash_never_makes_the_liars_delta_pending(make_run, after):
    """The run is as it was, or back without the client's deltas, wherever the command died."""
    outcomes = set()
    for at in range(1, 99):
        run = make_run(f"run{at}", keep_versions=3)
        run.start()
        for version in (1, 2):
            run.round(version, "a", "liar")
        waits = DeltaKey("liar", 1, 2, 3)
        run.send(waits, np.ones(run.manifest.values, np.float32))
        run.close()
        disk = Dies(at, after=after)
        try:
            run.open(disk, from_version=0, leave_out={"liar": "it lies"}, only_facts=True)
        except SystemExit:
            run.store = None
        recovered = run.open()
        outcomes.add(recovered.version)
        lies = [DeltaKey("liar", 1, 0, 1), DeltaKey("liar", 1, 1, 2), waits]
        pending = {one.key for one in recovered.pending}
        if recovered.version == 2:
            assert pending == {waits}
        else:
            assert pending == {DeltaKey("a", 1, 0, 1)}
            assert [run.store.known(key) for key in lies] == ["quarantined"] * 3
            assert run.commit(*pending).version == 1
            run.send(after_that := DeltaKey("a", 1, 1, 3), np.ones(run.manifest.values, "f4"))
            assert run.commit(after_that).version == 2
        run.close()
        assert audit_run(run.root).is_clean
        if disk.left > 0:
            break
    assert outcomes == ({0} if after else {0, 2})  # the first call writes the one line
    assert at < 98


def test_a_client_without_deltas_is_no_reason_to_go_back(run):
    """A mistyped name must not make the liar's deltas pending again."""
    run.start()
    run.round(1, "liar")
    with pytest.raises(StoreError, match="lair has no delta that waits or was merged after 0"):
        run.open(from_version=0, leave_out={"lair": "by hand"})
    assert run.open().version == 1


def record(version, update_norm, **norms):
    """A version that moved by `update_norm`, of deltas of these norms by client."""
    merged = [evolve(merged_of(DeltaKey(name, 1, version - 1, 1)), norm=norm)
              for name, norm in norms.items()]  # fmt: skip
    return VersionRecord(version, "", "", 0, "", tuple(merged), 1.0, 0, 0, 1, update_norm)


@pytest.mark.parametrize(("records", "pending", "words"), [
    ([record(1, 2.0)], {"a": 1.0, "b": 9e19, "c": 1.0},
     "stop the parameter server and type fsl-node quarantine 'my run' --client b, or lower"),
    ([record(1, 2.0)], {"a": 3.0, "b": 4.0, "c": 2.0}, "quarantine 'my run' --client b, or"),
    ([record(2, 2.0), record(3, 9e9, a=1.0, b=5e4, c=1.0), record(4, 9e9, d=1.0)], {"d": 9e9},
     ("version 3 is destroyed: stop the parameter server and type fsl-node quarantine 'my run'"
     " --client b --from-version 2")),
    ([record(2, 2.0), record(3, 9e9, a=1.0, b=5e4, c=4e4, d=2.0)], {"d": 9e9},
     "--client c --client b --from-version 2"),
    ([record(3, 9e9, a=1.0), record(4, 1.0)], {"d": 9e9}, "no version that is kept is older"),
    ([record(4, 1.0)], {}, "no version that is kept is older"),
])  # fmt: skip
def test_the_way_out_names_what_is_at_fault(records, pending, words):
    """A destroyed version and its clients, or the pending delta far above the others."""
    waiting = [stored_of(DeltaKey(name, 1, 4, 1), norm) for name, norm in pending.items()]
    assert words in way_out(records, waiting, "my run")
