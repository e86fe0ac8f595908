"""Runs of a parameter server and clients in one process, over real sockets, to their end."""

import contextlib
import json
import threading

from attrs import define, evolve, field

from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy
from fsl_async.errors import StopError
from fsl_async.files.files import Files
from fsl_async.nodes.client import joining
from fsl_async.nodes.client.parts import ClientOptions
from fsl_async.nodes.ps import node as node_ps
from fsl_async.process.stopper import Stopper
from fsl_async.store.vectors.read_version import read_version
from fsl_async.store.versions.checkpoint import Checkpoints

ROUNDS, STEPS, BATCH, SEED = 3, 4, 2, 7
TUNE = {"rank": 4, "targets": "q_proj,v_proj", "context": 24, "steps": STEPS}
TUNED = {
    "tune.method": "lora",
    **{f"tune.{key}": value for key, value in TUNE.items()},
    "run.seed": SEED,
    "run.rounds": ROUNDS,
    "sync.trigger": "rounds",
    "sync.quorum": 1.0,
    "train.batch": BATCH,
    "train.learning_rate": 1e-2,
    "train.schedule": "constant",
    "train.warmup_steps": 0,
    "train.threads": 1,
    "train.device": "cpu",
    "data.holdout": 0.0,
    "store.keep_versions": ROUNDS + 1,
}
"""A short run that tunes a tiny base."""
WORDS = {"a": "the film was a joy to watch and ", "b": "a dull plot; ", "c": "who knows why "}


def config_of(settings, clients):
    """The configuration of a run that begins with so many clients."""
    found = {
        "sync.clients": clients,
        "sync.min_clients": clients,
        "listen.address": "tcp://127.0.0.1:0",
        **settings,
    }
    return load(None, [f"{key}={json.dumps(value)}" for key, value in found.items()])


def write_data(folder, **rows):
    """Write so many records of each site. Returns their files by name."""
    found = {}
    for name, count in rows.items():
        found[name] = folder / f"{name}.jsonl"
        lines = [json.dumps({"text": f"{WORDS[name]}{number}"}) + "\n" for number in range(count)]
        found[name].write_text("".join(lines))
    return found


@define
class Played:
    """Results of nodes by name; "ps" is the parameter server."""

    lines: dict = field(factory=dict)
    errors: dict = field(factory=dict)
    summaries: dict = field(factory=dict)


def play(config, run_dir, clients, *, raises=True, restart_at=None):
    """Run nodes to the end of all clients. clients: name -> its options.

    raises: an error of a node, else all are in the result. restart_at: a text and a
    function: at the first line of the parameter server with that text the function is called, and
    the server is stopped at once and started again.
    """
    run_dir.mkdir()
    played = Played({name: [] for name in ("ps", *clients)})
    listening, address, stops = threading.Event(), [], [Stopper()]

    def announce(at):
        address.append(at)
        listening.set()

    def log(line):
        played.lines["ps"].append(line)
        if restart_at is not None and restart_at[0] in line and len(stops) == 1:
            stops.append(Stopper())
            restart_at[1]()
            stops[0].request(hard=True)

    def serve():
        given = {"from_version": None, "announce": announce, "log": log}
        with contextlib.suppress(StopError):
            node_ps.serve(config, run_dir, stop=stops[0], **given)
        if len(stops) > 1:
            listen = evolve(config.listen, address=address[0])
            node_ps.serve(evolve(config, listen=listen), run_dir, stop=stops[1], **given)

    def client(name):
        options = {"policy": SitePolicy(frozenset(KINDS)), **clients[name]}
        chosen = ClientOptions(address[0], name, **options)
        log = played.lines[name].append
        played.summaries[name] = joining.join_run(chosen, stop=Stopper(), log=log)

    def guarded(name, work, *given):
        def wrapped():
            try:
                work(*given)
            except BaseException as error:  # noqa: BLE001 - looked at below
                played.errors[name] = error
            finally:
                listening.set()

        thread = threading.Thread(target=wrapped, daemon=True)
        thread.start()
        return thread

    server, threads = guarded("ps", serve), []
    assert listening.wait(30)
    if not played.errors:
        threads = [guarded(name, client, name) for name in clients]
    for thread in threads:
        thread.join(120)
    stops[-1].request()
    server.join(60)
    assert not any(thread.is_alive() for thread in (server, *threads)), played
    if raises and played.errors:
        raise next(iter(played.errors.values()))
    return played


def versions_of(run_dir, manifest):
    """The weights of each version on disk."""
    checkpoints = Checkpoints(Files(), run_dir)
    return {
        version: read_version(Files(), checkpoints, version, manifest).weights
        for version in checkpoints.versions()
    }


def ledger_of(run_dir, fact):
    """The ledger's lines of one fact."""
    lines = (run_dir / "ledger.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["fact"] == fact]
