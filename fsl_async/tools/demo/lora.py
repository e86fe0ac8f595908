"""`demo lora`: a model that knows Python learns English at sites that keep their texts.

1  a small base model is made from the standard library's source (`lora_base`), unless given
2  English records are dealt to the sites, unless given
3  a parameter server and the clients tune adapters by rounds; one client gets SIGKILL at a
   quarter of them, is launched again and catches up; the others go on meanwhile
4  the same number of steps is trained without federation, by each site alone and on all records
   (`fsl_async.tools.compare.alone`), and all are measured on the held-out records of all sites

The English texts are `pydoc_data.topics`, what `help("assert")` shows: 79 topics, half a megabyte.
Each site gets whole topics, so what a site has tells it little about the others' texts. The last
part of each site's records is held out from training everywhere.
"""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from fsl_async.config.load import load, resolved
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import ConfigError, DataError, FslError, StopError, UsageError, to_install
from fsl_async.files.files import make_folder
from fsl_async.observe.ledger_audit import LEDGER, read_ledger
from fsl_async.roles.phrasing import counted, figure
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.scenario import (
    Choices,
    Conclusion,
    Played,
    Scenario,
    Settings,
)

RECORD_CHARACTERS = 320
"""A record is as many whole paragraphs as fit, and at least one."""
HELD_OUT_SHARE = 0.1

_BLANK_LINES = re.compile(r"\n\s*\n")


def python_topics() -> dict[str, str]:
    """The texts by topic. Raises DataError where this Python lacks them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise DataError(
            "this Python has no pydoc_data.topics, the English that the demo trains on: give"
            " texts of your own with --data FILE.jsonl, once for each client"
        ) from None
    return dict(topics)


def records_of(text: str, characters: int = RECORD_CHARACTERS) -> list[str]:
    """Cut a text at blank lines into records of about so many characters."""
    found: list[str] = []
    for paragraph in filter(None, map(str.strip, _BLANK_LINES.split(text))):
        if found and len(found[-1]) + len(paragraph) + 2 <= characters:
            found[-1] += f"\n\n{paragraph}"
        else:
            found.append(paragraph)
    return found


def topic_records(sites: int) -> list[list[str]]:
    """Deal Python's topics to sites; return the records of each.

    Every so-manieth topic by length is a site's: about as much text for each. Every so-manieth
    record is at the end, which is held out, so both parts are of all its texts. Raises DataError
    where there are fewer topics than sites.
    """
    topics, every = python_topics(), round(1 / HELD_OUT_SHARE)
    if len(topics) < sites:
        raise DataError(f"{len(topics)} topics cannot be dealt to {sites} clients")
    order = sorted(topics, key=lambda name: (len(topics[name]), name))
    dealt = []
    for site in range(sites):
        records = [record for name in order[site::sites] for record in records_of(topics[name])]
        last = records[every - 1 :: every]
        del records[every - 1 :: every]
        dealt.append(records + last)
    return dealt


BASE_STEPS = 160
"""Steps in which the demo's base is made."""
STEPS = 4
"""Steps of a client in a round."""
LIMIT_S = 3600.0
"""The run ends then even if its rounds are not done."""
RATE, BATCH, CONTEXT = 1e-2, 4, 128
"""AdamW's rate for adapters of the demo's base, records in a step, tokens of a record at most."""
OTHER_RATE = 1e-3
"""The rate for a base of the user's."""
_SUMS = ("steps", "tokens", "bytes")

Work = dict[str, Counter[str]]
"""By site, sums over its accepted deltas: deltas, steps, tokens, bytes."""


def lora(chosen: Choices) -> Scenario:
    """The demo. It ends after its rounds, when the killed client trains again."""
    names = scenario.names_of(chosen.clients or len(chosen.data) or 3)
    victim, kill_at = scenario.victim_of(names), max(1, chosen.rounds // 4)
    chosen = evolve(chosen, run_dir=chosen.run_dir.resolve())
    run_dir, base, files = chosen.run_dir, base_of(chosen), files_of(chosen, names)
    settings: Settings = {
        "run.name": "demo-lora",
        **chosen.common(len(names)),
        "sync.trigger": "rounds",
        "sync.min_clients": len(names),
        "data.holdout": HELD_OUT_SHARE,
        "tune.method": "lora",
        "tune.rule": chosen.rule,
        "tune.rank": chosen.rank,
        "tune.steps": STEPS,
        "tune.context": CONTEXT,
        "train.batch": BATCH,
        "train.learning_rate": OTHER_RATE if chosen.base else RATE,
        "train.schedule": "constant",
        "train.warmup_steps": 5,
        "train.evaluate_share": 0.0,  # measured after the run
    }
    digests: list[str] = []
    """The digest of the base, taken before the run."""

    def prepare(stage: scenario.Stage) -> None:
        if not chosen.data:
            write_records(files)
        if not chosen.base:
            from fsl_async.tools.demo.lora_base import make_base

            make_base(base, seed=chosen.seed, steps=BASE_STEPS, stage=stage)
        digests.append(digest_of(base))

    options = ("--base", str(base))
    # A site lets adapters and metrics out, and nothing else.
    allowed = "adapters,metrics"
    made = chosen.base or "a small Llama, which the demo first trains on Python's standard library"
    texts = "records of their own" if chosen.data else "English of their own, from Python's help()"
    return Scenario(
        chosen=chosen,
        settings=settings,
        nodes=[
            scenario.server(chosen, settings, *options),
            *(
                scenario.client(name, run_dir, allowed, *options, data=file)
                for name, file in zip(names, files, strict=False)  # `check` refuses another number
            ),
        ],
        **scenario.by_rounds(chosen, victim, kill_at, LIMIT_S),
        check=lambda: check(chosen, names),
        prepare=prepare,
        introduction=[
            f"a parameter server and {counted(len(names), 'client')}, each a process of its own",
            f"base: {made}",
            (f"clients tune its adapters on {texts}; only adapters and metrics may leave a site"),
            (
                f"{chosen.rounds} rounds of {STEPS} steps, merged by {chosen.rule}; {victim} gets"
                f" SIGKILL at version {kill_at}, is launched again and has to catch up"
            ),
            f"files and logs: {run_dir}",
            "",
        ],
        conclude=lambda played, stage: conclude(played, stage, digests),
    )


def base_of(chosen: Choices) -> Path:
    """Where the base is."""
    return Path(chosen.base) if chosen.base else chosen.run_dir / "base"


def files_of(chosen: Choices, names: Sequence[str]) -> Sequence[str]:
    """Return the file of each site's records."""
    return chosen.data or [str(chosen.run_dir / "sites" / f"{name}.jsonl") for name in names]


def check(chosen: Choices, names: Sequence[str]) -> None:
    """Raise before anything is made: a missing extra, too few or too many files or records."""
    for name in ("transformers", "peft"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"demo lora needs {name}: {to_install('hf')}")
    if chosen.data and len(chosen.data) != len(names):
        raise UsageError(
            f"--data is given {len(chosen.data)} times for {counted(len(names), 'client')}: give"
            " each client a file"
        )
    from fsl_async.learn.tune.records import Records

    for path in chosen.data:
        if sum(1 for _ in itertools.islice(Records(path, TuneConfig().objective), 2)) < 2:
            raise DataError(
                f"data {path!r}: a client needs at least two records: one to train on, one to test"
                " with"
            )


def write_records(files: Sequence[str]) -> None:
    """Write the records of Python's help, a file for each site. Raises DataError."""
    make_folder(Path(files[0]).parent)
    for file, records in zip(files, topic_records(len(files)), strict=True):
        lines = [json.dumps({"text": record}) + "\n" for record in records]
        Path(file).write_text("".join(lines), encoding="utf-8")


def digest_of(folder: Path) -> str:
    """SHA-256 over the names and contents of a base's files."""
    found = hashlib.sha256()
    files = [folder] if folder.is_file() else sorted(folder.rglob("*"))
    for path in files:
        if path.is_file():
            found.update(f"{path.name}\n".encode())
            with path.open("rb") as stream:
                found.update(hashlib.file_digest(stream, "sha256").digest())
    return found.hexdigest()


def measured(
    chosen: Choices, settings: Settings, names: Sequence[str], stage: scenario.Stage
) -> dict[str, float]:
    """Return losses by name: base, federated, alone (by site) and pooled, in nats a token.

    Trains without federation as many steps as the sites have trained in the run; "pooled" trains
    their sum. Nothing is measured where the run has no step.
    """
    from fsl_async.tools.compare.alone import TunedModel, read_sites
    from fsl_async.tools.compare.tune import CENTRAL, POOLED

    work, base, run_dir = work_of(chosen.run_dir), str(base_of(chosen)), chosen.run_dir
    if not work:
        return {}
    stage.say("training without federation, to compare: each site alone, and all in one place")
    config = resolved(load(None, scenario.overrides(settings)))
    # What a rule changes between versions has no meaning in one process, which knows its end and
    # so trains best with a rate that falls towards it.
    tune = evolve(config.tune, rule=CENTRAL, rank=config.tune.adapter_rank)
    central = evolve(config, tune=tune, train=evolve(config.train, schedule="wsd"))
    sites = read_sites(config, base, files_of(chosen, names))
    own = dict(zip(names, sites.trained, strict=True))
    jobs = {name: (own[name], sums["steps"]) for name, sums in work.items()}
    jobs[POOLED] = sites.all_trained, sum(steps for _, steps in jobs.values())
    losses = {
        "base": TunedModel(central, base, "base", sites.held).score().loss,
        "federated": TunedModel(config, base, "federated", sites.held)(run_dir).loss,
    }
    for name, (records, steps) in jobs.items():
        model = TunedModel(central, base, name, sites.held, steps)
        model.train(records, stage)
        losses[name] = model.score().loss
    return losses


def work_of(run_dir: Path) -> Work:
    """By client, from the run's ledger; empty where there is none."""
    with contextlib.suppress(OSError):
        return sums_of(read_ledger(run_dir / LEDGER)[0])
    return {}


def sums_of(facts: Iterable[Mapping[str, Any]]) -> Work:
    """The same from the ledger's facts."""
    sums: Work = {}
    for fact in facts:
        if fact.get("fact") == "accepted":
            own = sums.setdefault(str(fact["key"]).split("/", 1)[0], Counter())
            own.update({name: int(fact[name]) for name in _SUMS}, deltas=1)
    return dict(sorted(sums.items()))


def conclude(played: Played, stage: scenario.Stage, digests: Sequence[str]) -> Conclusion:
    """Measure, and sum up. digests: of the base, before the run."""
    made, losses = played.scenario, dict[str, float]()
    try:
        losses = measured(made.chosen, made.settings, made.names, stage)
    except StopError:
        raise
    except FslError as error:  # the run itself was good
        played.problems.append(error.message)
    is_unchanged = [digest_of(base_of(made.chosen))] == digests
    summary = summarize(played, losses, is_unchanged=is_unchanged)
    return Conclusion(summary, lines(played, summary), problems_of(played, summary))


def summarize(
    played: Played, measured: Mapping[str, float], *, is_unchanged: bool
) -> dict[str, Any]:
    """The last object of `demo lora --json`. Losses: nats a token of the held-out records.

    bytes_up: of a site's delta as sent, mean; bytes_up_fp32: the same in full precision.
    base_bytes: of the base's files, which no site sends. measured: losses by name. is_unchanged:
    whether the run left the base's files as they were.
    """
    chosen, names = played.scenario.chosen, played.scenario.names
    base, ps = base_of(chosen), played.state.ps
    files = [base] if base.is_file() else base.glob("*.safetensors")
    losses = {name: round(loss, 4) for name, loss in measured.items()}
    alone = {name: losses[name] for name in names if name in losses}
    total = sum(work_of(chosen.run_dir).values(), Counter[str]())
    return {
        "rule": chosen.rule,
        "rank": load(None, scenario.overrides(played.scenario.settings)).tune.adapter_rank,
        "rounds": ps.rounds,
        "clients": len(names),
        "steps": total["steps"],
        "tokens": total["tokens"],
        "loss_base": losses.get("base"),
        "loss_alone": round(sum(alone.values()) / len(alone), 4) if alone else None,
        "loss_alone_by_site": alone,
        "loss_federated": losses.get("federated"),
        "loss_pooled": losses.get("pooled"),
        "bytes_up": round(total["bytes"] / max(1, total["deltas"])),
        "bytes_up_fp32": 4 * ps.values,
        "base_bytes": sum(path.stat().st_size for path in files),
        "base_unchanged": is_unchanged,
        **played.counts(),
        "seconds": played.seconds,
        "run_dir": str(chosen.run_dir),
    }


def problems_of(played: Played, summary: Mapping[str, Any]) -> list[str]:
    """Return one line for each failed check; none for a demo that passed."""
    version, wanted = played.state.ps.version, played.scenario.chosen.rounds
    losses = [summary[f"loss_{name}"] for name in ("base", "federated", "pooled")]
    base, federated, _ = losses
    is_measured = None not in losses
    return [
        *played.common_problems(),
        *scenario.failed(
            (version >= wanted, f"{max(version, 0)} of {wanted} rounds were merged"),
            (summary["base_unchanged"], "the base's files have changed"),
            (is_measured, "not all models were measured"),
            (
                not is_measured or federated < base,
                f"the run's loss {_shown(federated)} is not below the base's {_shown(base)}",
            ),
        ),
    ]


def table(summary: Mapping[str, Any]) -> list[str]:
    """Losses side by side."""
    base = summary["loss_base"]
    rows = {
        "base, not tuned": base,
        **{f"{name} alone": loss for name, loss in summary["loss_alone_by_site"].items()},
        "mean of the sites alone": summary["loss_alone"],
        f"federated ({summary['rule']}, rank {summary['rank']})": summary["loss_federated"],
        "all records in one place": summary["loss_pooled"],
    }
    shown = [f"{'':32}{'held-out loss':>14}{'below base':>12}   (nats/token)"]
    for name, loss in rows.items():
        is_known = None not in (base, loss) and not name.startswith("base")
        below = f"{base - loss:.3f}" if is_known else ""
        shown.append(f"  {name:30}{_shown(loss):>14}{below:>12}")
    return shown


def _shown(loss: float | None) -> str:
    return "-" if loss is None else figure(loss)


def lines(played: Played, summary: Mapping[str, Any]) -> list[str]:
    """Return the summary as text lines."""
    up, full = summary["bytes_up"], summary["bytes_up_fp32"]
    state = "unchanged" if summary["base_unchanged"] else "CHANGED"
    return [
        (
            f"{counted(summary['rounds'], 'round')}, {summary['steps']} steps and"
            f" {summary['tokens']:,} tokens trained by {counted(summary['clients'], 'client')}"
            f" in {summary['seconds']:.0f} s"
        ),
        *table(summary),
        (
            f"a site sent {up:,} bytes a round ({full:,} in fp32, {full / max(1, up):.1f} times"
            f" more); the base has {summary['base_bytes']:,}, and no site sent it"
        ),
        f"SHA-256 of the base's files: {state}",
        *played.last_lines(),
    ]
