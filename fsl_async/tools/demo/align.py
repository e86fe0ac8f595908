"""`demo align`: a model that knows digits learns to sort them, from rewards alone.

1  a small base learns to write five digits in any order after five digits and "=" (`make_base`)
2  each site gets prompts of digits of its own, and a file with a reward function: the share of the
   places where an answer has the sorted digit; it rates answers at the site, and stays there
3  a parameter server and the clients tune adapters by GRPO; one client gets SIGKILL at a quarter of
   the rounds, is launched again and catches up
4  base and version answer the prompts that no site has trained on; with its adapters off the
   version must answer as the base does, to the bit
"""

import importlib.util
import itertools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import evolve

from fsl_async.config.load import load, resolved
from fsl_async.errors import ConfigError, to_install
from fsl_async.files.files import make_folder
from fsl_async.learn.data.counter import permutation
from fsl_async.learn.models.adapters import adapters_off
from fsl_async.learn.models.hf import collector_paused, extra
from fsl_async.learn.tune.answers import Prompts, Rater, load_reward, uniforms_of
from fsl_async.learn.tune.base import Base, Tuned, load_base, save_base
from fsl_async.learn.tune.records import Records
from fsl_async.roles.phrasing import counted
from fsl_async.tools.demo import scenario
from fsl_async.tools.demo.scenario import Choices, Conclusion, Played, Scenario, Settings
from fsl_async.tools.kept_run import KeptRun

DIGITS, PLACES = 10, 5
WIDTH, LAYERS, HEADS = 128, 4, 4
BASE_STEPS, BASE_BATCH, BASE_RATE = 500, 64, 1e-3
PAD, BEGIN, END, EQUALS = range(DIGITS, DIGITS + 4)
_SPECIAL = ("<pad>", "<s>", "</s>", "=")
STEPS, PROMPTS, GROUP, RATE = 4, 16, 8, 3e-3
HELD_OUT = 0.1
COLUMNS = ("base", "federated", "base drawn", "federated drawn")
LIMIT_S = 900.0

REWARD = '''"""Rates answers at this site, and never leaves it."""


def reward(prompt: str, answer: str) -> float:
    """Return the share of places with the right digit: "3 1 2 5 4 =" wants "1 2 3 4 5"."""
    wanted, given = sorted(prompt.split()[:-1]), answer.split()
    return sum(one == other for one, other in zip(wanted, given)) / len(wanted)
'''


def align(chosen: Choices) -> Scenario:
    """The demo. It ends after its rounds, when the killed client trains again."""
    names = scenario.names_of(chosen.clients or 3)
    victim, kill_at = scenario.victim_of(names), max(1, chosen.rounds // 4)
    chosen = evolve(chosen, run_dir=chosen.run_dir.resolve())
    run_dir, base = chosen.run_dir, chosen.run_dir / "base"
    settings: Settings = {
        "run.name": "demo-align",
        **chosen.common(len(names)),
        "sync.trigger": "rounds",
        "sync.min_clients": len(names),
        "data.holdout": HELD_OUT,
        "tune.method": "lora",
        "tune.objective": "grpo",
        "tune.steps": STEPS,
        "tune.group": GROUP,
        "tune.answer_tokens": PLACES + 1,
        "train.batch": PROMPTS,
        "train.learning_rate": RATE,
        "train.schedule": "constant",
        "train.warmup_steps": 0,
        "train.evaluate_share": 0.0,  # measured after the run
    }

    def prepare(stage: scenario.Stage) -> None:
        make_base(base, seed=chosen.seed, stage=stage)
        for number, name in enumerate(names):
            folder = site_of(run_dir, name)
            make_folder(folder)
            rows = [json.dumps({"prompt": one}) + "\n" for one in prompts_of(number, chosen.seed)]
            (folder / "prompts.jsonl").write_text("".join(rows))
            (folder / "reward.py").write_text(REWARD)

    def client(name: str) -> scenario.Node:
        folder = site_of(run_dir, name)
        options = "--base", str(base), "--reward", str(folder / "reward.py")
        data = str(folder / "prompts.jsonl")
        return scenario.client(name, run_dir, "adapters,metrics", *options, data=data)

    return Scenario(
        chosen=chosen,
        settings=settings,
        nodes=[
            scenario.server(chosen, settings, "--base", str(base)),
            *(client(name) for name in names),
        ],
        **scenario.by_rounds(chosen, victim, kill_at, LIMIT_S),
        check=check,
        prepare=prepare,
        introduction=[
            f"a parameter server and {counted(len(names), 'client')}, each a process of its own",
            "base: a small Llama, which the demo first trains to write five digits in any order",
            (
                "each site has prompts of digits of its own and a reward function, which rates the"
                " model's answers there; only adapters and metrics may leave a site"
            ),
            (
                f"{chosen.rounds} rounds of {STEPS} steps of {PROMPTS} prompts with {GROUP} answers"
                f" each; {victim} gets SIGKILL at version {kill_at}"
            ),
            f"files and logs: {run_dir}",
            "",
        ],
        conclude=conclude,
    )


def check() -> None:
    """Raise before anything is made: a missing extra."""
    for name in ("transformers", "peft"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"demo align needs {name}: {to_install('hf')}")


def site_of(run_dir: Path, name: str) -> Path:
    """Return the folder of a site's files."""
    return run_dir / "sites" / name


def prompts_of(site: int, seed: int) -> list[str]:
    """Return all orders of a site's five digits, in an order by the seed.

    Sites have digits 0 to 4, 3 to 7, 5 to 9, and again from there.
    """
    first = (0, 3, 5)[site % 3]
    every = list(itertools.permutations(range(first, first + PLACES)))
    order = permutation(seed, f"demo align/{site}", len(every))
    return [" ".join(map(str, every[place])) + " =" for place in order]


def make_base(folder: Path, *, seed: int, stage: scenario.Stage, steps: int = BASE_STEPS) -> None:
    """Train the base and write it to `folder`. Raises the stopper's error."""
    torch.set_num_threads(1)
    with collector_paused():
        extra("peft")
        transformers = extra("transformers")
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=DIGITS + 4,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=2 * PLACES + 6,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    model = transformers.LlamaForCausalLM(config)
    stage.say(f"the base: a Llama of {sum(w.numel() for w in model.parameters()):,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), lr=BASE_RATE)
    chance, begun = np.random.Generator(np.random.Philox(key=seed)), time.monotonic()
    for step in range(1, steps + 1):
        stage.check()
        rows = np.stack([chance.permutation(DIGITS)[:PLACES] for _ in range(BASE_BATCH)])
        ends = [np.full((BASE_BATCH, 1), one) for one in (BEGIN, EQUALS, END)]
        begin, equals, end = ends
        ids = np.concatenate([begin, rows, equals, chance.permuted(rows, axis=1), end], 1)
        batch = torch.from_numpy(ids)
        labels = batch.clone()
        labels[:, : PLACES + 2] = -100
        loss = model(input_ids=batch, labels=labels, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % (steps // 2) == 0:
            spent = time.monotonic() - begun
            stage.say(f"the base: step {step} of {steps}, loss {loss.item():.2f}, {spent:.0f} s")
    save_base(Base(model.eval(), _tokenizer(), (), 0), folder)


def _tokenizer() -> Any:
    parts = extra("tokenizers")
    words = [*map(str, range(DIGITS)), *_SPECIAL]
    vocabulary = {word: number for number, word in enumerate(words)}
    made = parts.Tokenizer(parts.models.WordLevel(vocabulary, unk_token=_SPECIAL[0]))
    made.pre_tokenizer = parts.pre_tokenizers.WhitespaceSplit()
    made.post_processor = parts.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return extra("transformers").PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=_SPECIAL[0],
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
    )


def measured(run_dir: Path, settings: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Return mean rewards of answers to prompts that no site has trained on, by column and site.

    drawn: of answers drawn from the model; else of its likeliest ones. is_base: whether the version
    without its adapters is the base.
    """
    tune = resolved(load(None, scenario.overrides(settings))).tune
    run, base = KeptRun(run_dir), run_dir / "base"
    tuned = Tuned(base, tune, int(run.settings()["run"]["seed"]), run.manifest)
    tuned.load(run.chosen(None).vector)
    plain = load_base(base, "lm").model
    found: dict[str, dict[str, float]] = {one: {} for one in COLUMNS}
    is_base = True
    for name in names:
        folder = site_of(run_dir, name)
        tokenizer, reward = tuned.base.tokenizer, load_reward(str(folder / "reward.py"))
        prompts = Prompts(Records(folder / "prompts.jsonl", "grpo"), tokenizer, tune.context)
        held = prompts.at(prompts.split(HELD_OUT)[1])
        for what, model in (("base", plain), ("federated", tuned.model)):
            answers = Rater(model, tokenizer, reward, tune)
            found[what][name] = answers.greedy_reward(held)
            drawn = answers.batch(held, uniforms_of(tuned.tune.group, f"demo align/{name}"))
            found[f"{what} drawn"][name] = drawn.metrics["reward"]
        ids = torch.tensor([one.ids for one in held])
        with torch.no_grad(), adapters_off(tuned.model):
            is_base &= torch.equal(tuned.model(ids).logits, plain(ids).logits)
    return {**found, "is_base": is_base}


def conclude(played: Played, stage: scenario.Stage) -> Conclusion:
    """Measure, and sum up."""
    made, names = played.scenario, played.scenario.names
    stage.say("measuring base and version on prompts that no site has trained on")
    found = measured(made.chosen.run_dir, made.settings, names)
    means = {what: sum(found[what].values()) / len(names) for what in COLUMNS}
    summary = {
        "rounds": played.state.ps.rounds,
        "clients": len(names),
        **{f"reward_{what.replace(' ', '_')}": round(mean, 4) for what, mean in means.items()},
        "reward_by_site": {name: round(one, 4) for name, one in found["federated"].items()},
        "adapters_off_is_base": found["is_base"],
        **played.counts(),
        "seconds": played.seconds,
        "run_dir": str(made.chosen.run_dir),
    }
    rows = {"drawn answers, all sites": (means["base drawn"], means["federated drawn"])}
    rows |= {
        f"likeliest, {name}": (found["base"][name], found["federated"][name]) for name in names
    }
    shown = [f"{'share of places right':30}{'base':>8}{'version':>10}"]
    shown += [f"  {label:28}{one:8.2f}{other:10.2f}" for label, (one, other) in rows.items()]
    same = "answers as the base does, to the bit" if found["is_base"] else "IS NOT THE BASE"
    lines = [
        f"{counted(played.state.ps.rounds, 'round')} in {played.seconds:.0f} s",
        *shown,
        f"without its adapters the version {same}",
        *played.last_lines(),
    ]
    version, wanted = played.state.ps.version, made.chosen.rounds
    problems = [
        *played.common_problems(),
        *scenario.failed(
            (version >= wanted, f"{max(version, 0)} of {wanted} rounds were merged"),
            (found["is_base"], "without its adapters the version is not the base"),
            (means["federated"] > means["base"], "the version's reward is not above the base's"),
        ),
    ]
    return Conclusion(summary, lines, problems)
