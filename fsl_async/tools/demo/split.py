"""`demo split`: both servers in one process, clients that hold one block, one of them killed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from fsl_async.accounting.sizes import Account, account_lines
from fsl_async.observe.journal import JournalReader
from fsl_async.roles.phrasing import counted
from fsl_async.roles.split.methods import METHODS
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.places import SERVER
from fsl_async.tools.demo.scenario import (
    Choices,
    Conclusion,
    Fault,
    Played,
    Scenario,
    Settings,
)

LIMIT_S = 600.0
WHOLE_STEPS = 3

DEEP: Settings = {
    "model.layers": 8,
    "model.width": 64,
    "model.heads": 4,
    "model.context": 128,
}
"""The demo's own model: 0.4 M parameters in many blocks, because a client saves memory by
blocks.
"""


def split(chosen: Choices) -> Scenario:
    """The demo. It ends after its rounds; a client is killed at a third of them."""
    names = scenario.names_of(chosen.clients or 3)
    victim, kill_at = scenario.victim_of(names), max(1, chosen.rounds // 3)
    settings: Settings = {
        "run.name": "demo-split",
        "run.rounds": chosen.rounds,
        **chosen.common(len(names), "split"),
        "sync.min_clients": len(names),
        "split.method": chosen.method,
        "split.cut": 1,
        "split.listen": chosen.places.listen,
        "split.samples": 64,
        "split.upload_every": 1,
        "split.align_every": 4,
        "split.align_passes": 4,
        "split.align_rate": 3e-3,
        "split.buffer_samples": 16,
        **chosen.of_text(),
        **({"model.preset": chosen.preset} if chosen.preset else DEEP),
        "train.learning_rate": 4e-3,
    }
    both = scenario.server(chosen, settings, "--with-ps", role="server")
    allowed = "deltas,activations,labels,metrics"
    return Scenario(
        chosen=chosen,
        settings=settings,
        nodes=[
            evolve(both, journal="ps/journal.jsonl"),
            *(scenario.client(name, chosen.run_dir, allowed, data=chosen.text) for name in names),
        ],
        faults=[Fault(victim, lambda played: played.state.ps.version >= kill_at)],
        is_over=lambda played: bool(played.lost) or played.elapsed() > LIMIT_S,
        is_begun=lambda played: played.state.ps.version > 0,
        introduction=[
            (
                f"a parameter server and a split server in one process, {len(names)} clients that"
                f" hold the embedding and one block of a GPT of {chosen.preset or '0.4m'}"
                f" parameters; {victim} gets SIGKILL at version {kill_at};"
                f" files and logs: {chosen.run_dir}"
            ),
        ],
        conclude=conclude,
    )


def conclude(played: Played, _: scenario.Stage) -> Conclusion:
    """Evaluate and sum up."""
    found, victim = summarize(played), played.scenario.victim
    done, wanted = found["rounds"], played.scenario.chosen.rounds
    problems = [
        *played.problems,
        *scenario.failed(
            (done >= wanted, f"{done} of {wanted} rounds were done"),
            (found["back_s"] is not None, f"{victim} was not killed and launched again"),
        ),
    ]
    return Conclusion(found, lines(found, victim), problems)


def summarize(played: Played) -> dict[str, Any]:
    """The object that `demo split --json` ends with. Loss in nats per byte, sizes in bytes.

    Evaluates the last weights; trains the whole model briefly to measure memory. back_uploads:
    uploads of the killed client's later incarnations that were trained.
    """
    from fsl_async.observe.ledger_audit import trained_by_life

    run_dir, victim = played.scenario.chosen.run_dir, played.scenario.victim
    overrides = scenario.overrides(played.scenario.settings)
    whole = whole_memory(overrides)
    results = {
        name: record
        for name, records in played.printed.items()
        for record in records
        if "traffic" in record
    }
    result, fault = results.pop(SERVER, {}), played.fault(victim)
    lives = trained_by_life(run_dir / "server", victim) if result else []
    return {
        "method": played.scenario.chosen.method,
        "rounds": int((result.get("ps") or {}).get("version", 0)),
        "clients": len(played.scenario.clients),
        "uploads": int(result.get("uploads", 0)),
        "eval_loss": evaluate_split(run_dir, overrides) if result else None,
        **traffic_of(run_dir),
        "client_memory": max((one["memory_grown"] for one in results.values()), default=0),
        "whole_memory": whole,
        "killed_s": None if fault is None else round(fault.begun - played.begun, 1),
        "back_s": played.launched.get(victim),
        "back_uploads": sum(lives[1:]),
        "seconds": played.seconds,
        "run_dir": str(run_dir),
    }


def traffic_of(run_dir: Path) -> dict[str, dict[str, Any]]:
    """Add up the bytes in both servers' journals, over all incarnations of all clients."""
    account = Account()
    for part in ("ps", "server"):
        for line in JournalReader(run_dir / part / "journal.jsonl").read_all():
            account.apply(line)
    return account.as_dict()


def whole_memory(overrides: Sequence[str]) -> int:
    """Return the bytes that training the whole model takes beyond those of the libraries.

    By this process's peak: call it before anything else builds a model.
    """
    import torch

    from fsl_async.config.load import load
    from fsl_async.learn.data.facts import facts_of
    from fsl_async.learn.models.families import build_model
    from fsl_async.learn.split.build import optimizer_of
    from fsl_async.learn.split.smashed import cross_entropy
    from fsl_async.learn.split.task import warm_up
    from fsl_async.process.memory import MemoryMark

    torch.set_num_threads(1)
    config = load(None, overrides)
    facts, size = facts_of(config), config.train.batch
    warm_up()
    model = build_model(config, facts)
    optimizer = optimizer_of(config).build(model.parameters())
    for _ in range(WHOLE_STEPS):
        if facts.language:
            inputs = torch.randint(0, facts.classes, (size, *facts.shape))
            labels = inputs.roll(-1, 1)
        else:
            inputs, labels = torch.rand(size, *facts.shape), torch.randint(facts.classes, (size,))
        loss = cross_entropy(model(inputs), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    return MemoryMark.grown()


def evaluate_split(run_dir: Path, overrides: list[str]) -> float:
    """Loss of x_c and x_s together on text that no client has trained on, nats per byte."""
    from fsl_async.config.load import load
    from fsl_async.learn.data.facts import described
    from fsl_async.learn.split.server_disk import ServerDisk
    from fsl_async.tools.compare.split import SplitScorer

    scorer = SplitScorer(described(load(None, overrides)), limit=64)
    disk = ServerDisk(run_dir / "server")
    state = disk.recover()
    disk.close()
    assert state.common is not None
    return round(scorer(run_dir, state.common).loss, 4)


def lines(found: dict[str, Any], victim: str) -> list[str]:
    """Return the summary as text lines."""
    has_auxiliary = METHODS[found["method"]].auxiliary != "none"
    shown = [
        (
            f"{found['rounds']} rounds of {found['method']}, {found['uploads']} uploads trained,"
            f" {found['seconds']:.0f} s"
        ),
        f"loss {found['eval_loss']} of both parts on text that no client has seen (nats/byte)"
        + ("; above it is that of auxiliary models" if has_auxiliary else ""),
        *account_lines("clients", found),
    ]
    own, whole = found["client_memory"], found["whole_memory"]
    if whole:
        shown.append(
            f"peak memory of a client beyond what it takes without a model: {own / 1e6:.0f} MB,"
            f" {own / whole:.0%} of the {whole / 1e6:.0f} MB that training the whole model takes"
        )
    if found["killed_s"] is not None and found["back_s"] is not None:
        uploads = counted(found["back_uploads"], "upload")
        late = "too late to train again before the run ended: give more --rounds"
        shown.append(
            f"{victim}: killed at {found['killed_s']:.1f} s, launched again at"
            f" {found['back_s']:.1f} s, "
            + (f"{uploads} trained after that" if found["back_uploads"] else late)
        )
    return [*shown, f"run directory: {found['run_dir']}"]
