"""Fine-tuning over the air by nodes in one process, over real sockets."""

import importlib.util

import numpy as np
import pytest
from node_runs import (
    BATCH,
    ROUNDS,
    SEED,
    STEPS,
    TUNE,
    TUNED,
    config_of,
    ledger_of,
    play,
    write_data,
)
from node_runs import versions_of as versions_in

from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.delta import DeltaKey

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.usefixtures("one_thread"),
]
CLEAR = {"air.snr_db": 200, "air.rician_k": 1e6, "codec.up": "fp32", "codec.down": "fp32"}


@pytest.fixture
def data(tmp_path):
    """Records of three sites."""
    return write_data(tmp_path, a=6, b=6, c=6)


@pytest.fixture
def run(tmp_path, base, data):
    """Run three sites to the end."""

    def run(settings, name="run", **how):
        clients = {one: {"data": str(path), "base": str(base)} for one, path in data.items()}
        found = {**TUNED, "outer.channel": "air", "sync.weighting": "uniform", **settings}
        return play(config_of(found, 3), tmp_path / name, clients, **how)

    return run


def check_counted(run_dir):
    """No delta is lost or merged twice; what has a weight has sent. Returns channel uses."""
    audit = audit_run(run_dir)
    assert audit.is_clean
    assert audit.merged == 3 * ROUNDS
    versions = [one for one in ledger_of(run_dir, "version") if one["version"]]
    sums = {one["version"]: one for one in ledger_of(run_dir, "received")}
    for version in versions:
        weighted = [one["key"] for one in version["merged"] if one["weight"]]
        senders = sums[version["version"]]["senders"]
        assert sorted(DeltaKey.parse(key).client for key in weighted) == senders
    return audit.channel_uses


@pytest.mark.parametrize("rule", ["fedit", "ffa", "rolora"])
def test_versions_are_the_means_of_sites_where_the_channel_is_clear(
    tmp_path, base, data, run, rule
):
    """For all rules that add up; a factor that rests takes no uses."""
    from tune_reference import Site, tuned

    run({"tune.rule": rule, **CLEAR})
    tune = tuned(rule=rule, **TUNE)
    sites = [Site(name, base, data[name], tune, rank=4, seed=SEED, batch=BATCH) for name in data]
    manifest = sites[0].weights.manifest
    found = versions_in(tmp_path / "run", manifest)
    for version in range(ROUNDS):
        trained = [site.train_round(version, found[version], STEPS)[0] for site in sites]
        wanted = np.mean(trained, axis=0) - found[version]
        made = found[version + 1] - found[version]
        assert np.linalg.norm(made - wanted) < 1e-5 * np.linalg.norm(wanted), (rule, version)
    uses = check_counted(tmp_path / "run")
    if rule == "rolora":
        assert uses < 0.7 * ROUNDS * manifest.values
    else:
        assert uses == ROUNDS * manifest.values


def test_scalars_of_zeroth_order_come_over_the_air(tmp_path, run):
    """A round takes as many uses as it has scalars."""
    run({"tune.method": "zeroth", "tune.zo_probes": 3, "tune.zo_rate": 1e-2})
    assert check_counted(tmp_path / "run") == 3 * ROUNDS


def test_a_parameter_server_that_dies_with_a_kept_sum_makes_the_same_version(
    tmp_path, run, monkeypatch
):
    """It is stopped between the line of the sum and the version, and goes on after a start."""
    from fsl_async.store.commit.merging import Merging
    from fsl_async.store.errors import StoreError

    digests = []
    for name, has_fault in (("plain", False), ("killed", True)):
        make, failed = Merging._make, []

        def fails(self, made, position, make=make, failed=failed):
            if made.version == 2 and len(failed) < 2:
                failed.append(self)
                raise StoreError("stopped here")
            return make(self, made, position)

        if has_fault:
            monkeypatch.setattr(Merging, "_make", fails)
            run({"air.snr_db": 0}, name, restart_at=("stopped here", lambda: None))
            assert len(failed) == 2
            assert failed[0] is not failed[1], "the second failure is of the second start"
        else:
            run({"air.snr_db": 0}, name)
        check_counted(tmp_path / name)
        folder = tmp_path / name
        versions = [one["version"] for one in ledger_of(folder, "received")]
        assert versions == [1, 2, 3]
        digests.append([one["digest"] for one in ledger_of(folder, "version")])
    assert digests[0] == digests[1]


def test_the_ledger_says_how_each_version_came(tmp_path, run):
    """Senders, scale, signal to noise, the largest power, uses."""
    run({"air.snr_db": 10, "air.estimate_error": 0.3, "air.timing_error": 0.2})
    for line in ledger_of(tmp_path / "run", "received"):
        assert line["snr_db"] == 10
        assert 0 < line["rms"] < 1
        assert 0 < line["power"] <= 1
        assert 0 < len(line["senders"]) <= line["sites"] == 3
