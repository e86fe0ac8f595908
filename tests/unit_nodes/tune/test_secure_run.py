"""Runs with secure sums by nodes in one process, over real sockets: what is opened, and what is
on the parameter server's disk.
"""

import importlib.util
import json
import re
import threading

import numpy as np
import pytest

from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.files.files import Files
from fsl_async.keys.folder import KeysFolder
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.ps import node as node_ps
from fsl_async.observe.ledger_audit import audit_run
from fsl_async.process.stopper import Stopper
from fsl_async.secure.lattice import MAGIC
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import Checkpoints

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("peft"), reason="needs the extra hf"),
    pytest.mark.skipif(not importlib.util.find_spec("cryptography"), reason="needs secure"),
    pytest.mark.usefixtures("one_thread"),
]
ROUNDS, STEPS, BATCH, SEED = 3, 4, 2, 7
TUNE = {"rank": 4, "targets": "q_proj,v_proj", "context": 24, "steps": STEPS}
SETTINGS = {
    "tune.method": "lora",
    "tune.secure": True,
    **{f"tune.{key}": value for key, value in TUNE.items()},
    "run.seed": SEED,
    "run.rounds": ROUNDS,
    "sync.clients": 3,
    "sync.min_clients": 3,
    "train.batch": BATCH,
    "train.learning_rate": 1e-2,
    "train.schedule": "constant",
    "train.warmup_steps": 0,
    "train.threads": 1,
    "train.device": "cpu",
    "data.holdout": 0.0,
    "codec.down": "fp32",
    "store.keep_versions": ROUNDS + 1,
    "listen.address": "tcp://127.0.0.1:0",
}
WORDS = {"a": "the film was a joy to watch and ", "b": "a dull plot; ", "c": "who knows why "}


def config_of(**changes):
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    return load(None, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


@pytest.fixture
def base(tmp_path):
    from tiny_base import write_llama

    return write_llama(tmp_path / "base")


@pytest.fixture
def data(tmp_path):
    found = {}
    for name, words in WORDS.items():
        found[name] = tmp_path / f"{name}.jsonl"
        lines = [json.dumps({"text": f"{words}{number}"}) for number in range(6)]
        found[name].write_text("\n".join(lines) + "\n")
    return found


def run(config, run_dir, options, keys):
    """Run the nodes to the end. options: of each client. Returns their lines."""
    run_dir.mkdir()
    listening, address, errors, lines = threading.Event(), [], [], []

    def guarded(work, *given):
        def wrapped():
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - raised by the test
                errors.append(error)
                listening.set()

        return threading.Thread(target=wrapped, daemon=True)

    def announce(at):
        address.append(at)
        listening.set()

    def serve():
        node_ps.serve(
            config, run_dir, from_version=None, announce=announce, log=lines.append, stop=Stopper()
        )

    def client(name):
        folder = KeysFolder(keys / name)
        folder.path.mkdir(mode=0o700, parents=True)
        folder.make_pair()
        policy = SitePolicy(frozenset(KINDS))
        chosen = ClientOptions(address[0], name, policy=policy, keys=folder, **options[name])
        joining.join_run(chosen, stop=Stopper(), log=lines.append)

    threads = [guarded(serve)]
    threads[0].start()
    listening.wait(30)
    if not errors:
        threads += [guarded(client, name) for name in options]
        for thread in threads[1:]:
            thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads)
    return lines


def versions_of(run_dir, manifest):
    checkpoints = Checkpoints(Files(), run_dir)
    return {
        version: read_version(Files(), checkpoints, version, manifest).weights
        for version in checkpoints.versions()
    }


@pytest.mark.parametrize("rule", ["fedit", "ffa", "rolora"])
def test_versions_are_the_means_of_sites_and_the_server_has_masked_words(
    tmp_path, base, data, rule
):
    from tune_reference import Site, tuned

    options = {name: {"data": str(data[name]), "base": str(base), "rank": 4} for name in data}
    lines = run(config_of(tune__rule=rule), tmp_path / "run", options, tmp_path / "keys")
    tune = tuned(rule=rule, **TUNE)
    sites = [Site(name, base, data[name], tune, rank=4, seed=SEED, batch=BATCH) for name in data]
    manifest = sites[0].weights.manifest
    found = versions_of(tmp_path / "run", manifest)
    assert sorted(found) == list(range(ROUNDS + 1))
    for version in range(ROUNDS):
        trained = [site.train_round(version, found[version], STEPS)[0] for site in sites]
        wanted = np.mean(trained, axis=0) - found[version]
        made = found[version + 1] - found[version]
        # The first lattices are fine; from then on a site begins with what coding has kept.
        error = np.linalg.norm(made - wanted) / np.linalg.norm(wanted)
        assert error < (1e-5 if not version else 0.2), (rule, version, error)
    assert sum("the sum of 3 clients is opened" in line for line in lines) == ROUNDS
    spooled = [path.read_bytes() for path in (tmp_path / "run" / "spool").iterdir()]
    assert len(spooled) >= 3
    assert all(content[12:16] == MAGIC for content in spooled)
    assert not audit_run(tmp_path / "run").problems
    known = (tmp_path / "keys" / "a" / "sites.txt").read_text()
    assert re.findall(r"\S{40}  (\w)", known) == ["b", "c"]


def test_scalars_of_zeroth_order_are_summed_under_masks(tmp_path):
    """The built-in task of zeroth order on a base; all hold the same weights."""
    from tiny_base import write_llama

    base = write_llama(tmp_path / "base")
    options = {}
    for name, words in WORDS.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps({"text": f"{words}{n}"}) + "\n" for n in range(6)))
        options[name] = {"data": str(path), "base": str(base)}
    config = config_of(tune__method="zeroth", codec__down="uniform", tune__zo_rate=1e-2)
    lines = run(config, tmp_path / "run", options, tmp_path / "keys")
    assert sum("the sum of 3 clients is opened" in line for line in lines) == ROUNDS
    spooled = [path.read_bytes() for path in (tmp_path / "run" / "spool").iterdir()]
    assert len(spooled) >= 3
    assert all(content[12:16] == MAGIC for content in spooled)
    assert "bug" not in " ".join(lines)


def test_a_site_without_a_key_is_told_to_make_one(tmp_path, base, data):
    from fsl_async.errors import FslError

    def no_pair(folder):
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    options = {name: {"data": str(data[name]), "base": str(base)} for name in data}
    made, KeysFolder.make_pair = KeysFolder.make_pair, no_pair
    try:
        with pytest.raises(FslError, match=r"no key in .*: run .* keys new"):
            run(config_of(run__seconds=20), tmp_path / "run", options, tmp_path / "keys")
    finally:
        KeysFolder.make_pair = made
