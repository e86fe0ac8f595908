"""Runs with secure sums by nodes in one process, over real sockets: what is opened, what is on the
parameter server's disk, and which runs a site refuses.
"""

import importlib.util
import json
import random
import re
import string

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
    play,
    versions_of,
    write_data,
)

from fsl_async.config.load import to_wire
from fsl_async.config.site_policy import SitePolicy
from fsl_async.errors import ExitCode, FslError, RefusedError
from fsl_async.keys.folder import KeysFolder
from fsl_async.nodes.ps import shell as shell_ps
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.roles.sync.roster import Roster, lattice_of
from fsl_async.secure.lattice import MAGIC, to_numbers

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.skipif(not importlib.util.find_spec("cryptography"), reason="needs secure"),
    pytest.mark.usefixtures("one_thread"),
]
OPENED = "the sum of 3 clients is opened"
SUMS = {"policy": SitePolicy(frozenset({"sums"}))}


@pytest.fixture
def data(tmp_path):
    """Records of three sites."""
    return write_data(tmp_path, a=6, b=6, c=6)


@pytest.fixture
def run(tmp_path, base, data):
    """Run three sites to the end, each with a key of its own. options: of each site."""

    def run(*, settings=None, options=None, has_keys=True, **how):
        clients = {}
        for name, path in data.items():
            keys = KeysFolder(tmp_path / "keys" / name)
            keys.path.mkdir(mode=0o700, parents=True)
            if has_keys:
                keys.make_pair()
            usual = {"data": str(path), "base": str(base), "keys": keys}
            clients[name] = {**usual, **(options or {})}
        found = {**TUNED, "tune.secure": True, "codec.down": "fp32", **(settings or {})}
        return play(config_of(found, 3), tmp_path / "run", clients, **how)

    return run


def check_masked(run_dir, played):
    """All sums were opened, and the parameter server's disk has masked words alone."""
    assert sum(OPENED in line for line in played.lines["ps"]) == ROUNDS
    spooled = [path.read_bytes() for path in (run_dir / "spool").iterdir()]
    assert len(spooled) >= 3
    assert all(content[12:16] == MAGIC for content in spooled)


@pytest.mark.parametrize("rule", ["fedit", "ffa", "rolora"])
def test_versions_are_the_means_of_sites_and_the_server_has_masked_words(
    tmp_path, base, data, run, rule
):
    """Also of sites that let out sums alone."""
    from tune_reference import Site, tuned

    played = run(settings={"tune.rule": rule}, options=SUMS)
    tune = tuned(rule=rule, **TUNE)
    sites = [Site(name, base, data[name], tune, rank=4, seed=SEED, batch=BATCH) for name in data]
    found = versions_of(tmp_path / "run", sites[0].weights.manifest)
    assert sorted(found) == list(range(ROUNDS + 1))
    for version in range(ROUNDS):
        trained = [site.train_round(version, found[version], STEPS)[0] for site in sites]
        wanted = np.mean(trained, axis=0) - found[version]
        made = found[version + 1] - found[version]
        # The first lattices are fine; from then on a site begins with what coding has kept.
        error = np.linalg.norm(made - wanted) / np.linalg.norm(wanted)
        assert error < (1e-5 if not version else 0.2), (rule, version, error)
    check_masked(tmp_path / "run", played)
    assert not audit_run(tmp_path / "run").problems
    known = (tmp_path / "keys" / "a" / "sites.txt").read_text()
    assert re.findall(r"\S{40}  (\w)", known) == ["b", "c"]


@pytest.mark.sweep
def test_the_lattice_reaches_what_32_sites_send(tmp_path, base):
    """Each has other words; docs/LIMITS.md has the error of the mean, and how far values go."""
    from tune_reference import Site, tuned

    rng, sites = random.Random(1), []
    words = ["".join(rng.choices(string.ascii_lowercase, k=5)) for _ in range(50)]
    for number in range(32):
        path, own = tmp_path / f"{number}.jsonl", rng.sample(words, 5)
        lines = [json.dumps({"text": " ".join(rng.choices(own, k=6))}) + "\n" for _ in range(12)]
        path.write_text("".join(lines))
        sites.append(Site(path.stem, base, path, tuned(**TUNE), rank=4, seed=SEED, batch=BATCH))
    members = [[f"s{number}", bytes([number]) * 32, bytes([number]) * 32] for number in range(32)]
    vector, rms = sites[0].vector(), 0.0
    for version in range(4):
        deltas = [site.train_round(version, vector, STEPS)[0] - vector for site in sites]
        roster = Roster(version, 1, *lattice_of(6, rms, of_scalars=False), members)
        numbers = [to_numbers(one, roster) for one in deltas]
        mean, made = np.mean(deltas, axis=0), roster.step * np.mean(numbers, axis=0)
        assert np.linalg.norm(made - mean) < 0.02 * np.linalg.norm(mean), version
        assert np.abs(numbers).max() < roster.largest, "none is clipped"
        vector, rms = vector + mean, float(np.sqrt(np.mean(mean[mean != 0] ** 2)))


def test_scalars_of_zeroth_order_are_summed_under_masks(tmp_path, run):
    """The built-in task of zeroth order on a base; all hold the same weights."""
    settings = {"tune.method": "zeroth", "codec.down": "uniform", "tune.zo_rate": 1e-2}
    played = run(settings=settings)
    check_masked(tmp_path / "run", played)
    assert "bug" not in str(played.lines)


def test_a_site_without_a_key_is_told_to_make_one(run):
    """Not with a traceback."""
    with pytest.raises(FslError, match=r"no key in .*: run .* keys new"):
        run(has_keys=False)


def test_a_site_that_lets_out_sums_alone_joins_no_run_without_masks(tmp_path, run):
    """It ends before it opens its data, with one line and exit code 2."""
    settings = {"tune.secure": False}
    nothing = {**SUMS, "data": str(tmp_path / "missing.jsonl")}
    errors = run(settings=settings, options=nothing, raises=False).errors
    assert sorted(errors) == ["a", "b", "c"]
    for error in errors.values():
        assert isinstance(error, RefusedError)
        assert error.exit_code == ExitCode.BAD_INPUT
        assert "needs adapters without masks sent to the parameter server" in error.message
        assert "this site allows sums only" in error.message
        assert "\n" not in error.message


def test_it_leaves_a_run_that_comes_back_without_masks(tmp_path, run, monkeypatch):
    """The parameter server is stopped after the first sum; its next welcomes lack `tune.secure`."""
    opened = []

    def welcome(config):
        wire = to_wire(config)
        wire["tune"]["secure"] = not opened
        return wire

    monkeypatch.setattr(shell_ps, "to_wire", welcome)
    how = {"raises": False, "restart_at": (OPENED, lambda: opened.append(True))}
    played = run(options=SUMS, **how)
    assert sorted(played.errors) == ["a", "b", "c"], played
    assert all("without masks" in str(error) for error in played.errors.values()), played
    spooled = [path.read_bytes() for path in (tmp_path / "run" / "spool").iterdir()]
    assert all(content[12:16] == MAGIC for content in spooled)
