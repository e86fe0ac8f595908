"""`fsl-node plan`: compute bytes, seconds and memory of a method before a run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from fsl_async.commands.options import Setting, Whole, WithJson, option, takes
from fsl_async.commands.output import Output
from fsl_async.config.rules import LANGUAGE_FAMILIES
from fsl_async.errors import UsageError
from fsl_async.roles.split.methods import ALIGNED, AUXILIARY, GRADIENTS, METHODS, names_of

if TYPE_CHECKING:
    from fsl_async.accounting.sizes import ModelShapes
    from fsl_async.plan.methods import PlannedMethod

TUNED = ("lora", "zeroth")
IMAGE_BATCH, TEXT_BATCH = 256, 16
"""Default batches: that of FSL-SAGE's figures, and that of train.batch."""

_COUNT = Whole(1, 10**12)


class PlanOptions(WithJson):
    """The options of `fsl-node plan`."""

    method: str = option(
        f"What to train with. With -u behind it ({GRADIENTS}) labels stay at home.",
        metavar="|".join((*names_of(), "pretrain", *TUNED)), required=True,
    )  # fmt: skip
    model: str = option(
        "resnet18-cifar10, resnet18-cifar100, a built-in GPT: gpt-0.5m ... gpt-1b, or a value of"
        " model.family: small-cnn, llama, FILE.py:FUNCTION ...; for lora and zeroth the base's"
        " folder.",
        metavar="NAME", required=True,
    )  # fmt: skip
    cut: str | None = option(
        "The last child before the cut, such as layer2; of a GPT the number of blocks before it.",
        metavar="WHERE",
    )
    overrides: tuple[str, ...] = option(
        "A setting of the run, for models of model.family: model.preset, model.sizes,"
        " data.sample_shape, split.auxiliary, split.lora_client ...; for lora tune.rule, tune.rank,"
        " tune.targets, tune.full ...",
        Setting(), "A.B=C", name="--set",
    )  # fmt: skip
    rank: int | None = option(
        "lora: rank of a client's adapters. [default: that of the run, tune.rank]",
        Whole(1, 4096), "R",
    )  # fmt: skip
    clients: int = option("", _COUNT, default=10)
    batch: int | None = option(
        f"Samples in a step. [default: {IMAGE_BATCH}; of a language model that of a run,"
        f" {TEXT_BATCH}]",
        _COUNT,
    )
    samples: int = option(
        "Samples of a client in a round; of a GPT windows of its context. Not of lora and zeroth,"
        " whose rounds have tune.steps or tune.zo_steps.",
        _COUNT, name="--samples-per-client", default=5000,
    )  # fmt: skip
    upload_every: int = option(
        f"{AUXILIARY}: steps from one upload to the next.", _COUNT, default=5
    )
    align_every: int = option(
        f"{ALIGNED}: rounds from one alignment to the next.", _COUNT, default=10
    )
    link: str = option(
        "Of each client; the delay is one way.", metavar="RATE,DELAY", default="100mbit,20ms"
    )
    number_format: str = option(
        "Of values at the cut, and of deltas. [default: bf16; pretrain: uniform]",
        metavar="fp32|bf16|e4m3|e5m2|uniform", name="--format", default="",
    )  # fmt: skip
    rounds: int = option("Add the total of this many rounds.", Whole(0, 10**12), default=0)
    as_published: bool = option(
        "Count as FSL-SAGE's figures do: fp32, no coding, labels and first download free."
    )


@click.command("plan")
@takes(PlanOptions)
def command(options: PlanOptions) -> None:
    """Compute what a run would send, the seconds on its links, and a client's memory.

    docs/PLAN.md has the formulas, the two ways of counting, and an example.
    """
    from fsl_async.plan.link import parse_link
    from fsl_async.plan.methods import Workload
    from fsl_async.plan.report import as_dict, as_text, make_plan

    method, model, overrides = options.method, options.model, options.overrides
    planned: str | PlannedMethod = method
    left_out, uses, batch, samples = "", 0, options.batch, options.samples
    if batch is None:
        batch = TEXT_BATCH if method in TUNED or _is_language_model(model) else IMAGE_BATCH
    if method in TUNED:
        planned, shapes, steps, uses, left_out = _tuned(options)
        samples = steps * batch
    else:
        shapes = _shapes(options)
    plan = make_plan(
        method=planned,
        shapes=shapes,
        work=Workload(options.clients, batch, samples, options.upload_every, options.align_every),
        link=parse_link(options.link),
        number_format=options.number_format,
        as_published=options.as_published,
        uses=uses,
    )
    output = Output(as_json=options.as_json)
    if left_out:
        output.say(left_out)
    if model in LANGUAGE_FAMILIES and not any(one.startswith("model.") for one in overrides):
        output.say(
            f"{model} is planned at the size of the default model.preset, a small one of"
            f" {plan.shapes.whole.parameters:,} parameters: give yours with"
            " --set model.preset=124m, or --set model.sizes=..."
        )
    output.answer(as_dict(plan, options.rounds), *as_text(plan, options.rounds))


def _is_language_model(model: str) -> bool:
    from fsl_async.config.presets import SIZES

    return model in LANGUAGE_FAMILIES or model.removeprefix("gpt-") in SIZES


def _tuned(options: PlanOptions) -> tuple[PlannedMethod, ModelShapes, int, int, str]:
    """The row and the shapes of adapters in the base in the folder --model, and steps a round.

    And uses of a radio channel a round, 0 without one; and a line about matrices that get no
    adapter, or "".
    """
    from pathlib import Path

    from fsl_async.commands.client import check_base
    from fsl_async.config.load import load
    from fsl_async.config.recipes import with_implied
    from fsl_async.config.site_policy import SiteChoices
    from fsl_async.learn.tune.base_files import base_facts, planned
    from fsl_async.plan.methods import Lora, Zeroth, adapter_shapes, adapter_values
    from fsl_async.store.rules.adapters import adapter_rule_named

    given = [f"tune.method={json.dumps(options.method)}"]
    config = load(None, [*options.overrides, *given], {"tune.method": "--method"})
    tune, is_on_air = config.tune, config.outer.channel != "none"
    if is_on_air:
        with_implied(config)  # raises where the run cannot have a channel
    folder = check_base(Path(options.model))
    facts = base_facts(folder)
    found = planned(facts, tune)
    unequal = adapter_rule_named(tune.rule).unequal_ranks
    site_rank = SiteChoices(rank=options.rank or 0).rank_in(tune, unequal=unequal)
    values = adapter_values(
        found.layers, tune.rule, rank=tune.adapter_rank, site_rank=site_rank, full=found.full
    )
    shapes = adapter_shapes(folder.name, values, facts.parameters)
    if options.method == "zeroth":
        scalars, steps = tune.zo_steps * tune.zo_probes, tune.zo_steps
        row: PlannedMethod = Zeroth(exchanged=values, scalars=scalars)
    else:
        scalars, steps = 0, tune.steps
        row = Lora(exchanged=values, by_rounds=tune.by_rounds)
    uses = (scalars or values.trained) if is_on_air else 0
    return row, shapes, steps, uses, found.left_out


def _shapes(options: PlanOptions) -> ModelShapes:
    """Shapes of a built-in name, or of a model that is built and measured."""
    from fsl_async.config.rules import FAMILIES, is_own
    from fsl_async.plan.shapes import find_shapes, is_known

    method, model, overrides = options.method, options.model, options.overrides
    if is_known(model) or not (model in FAMILIES or is_own(model)):
        shapes = find_shapes(model, options.cut)
        if overrides:
            raise UsageError(
                f"--set {overrides[0]} does not change {model}, whose shapes are fixed: "
                "give a model.family, like --model gpt --set model.preset=0.5m"
            )
        return shapes
    from fsl_async.config.load import load
    from fsl_async.learn.data.facts import described
    from fsl_async.learn.split.build import shapes_of
    from fsl_async.plan.methods import U_SHAPE

    name = method.removesuffix(U_SHAPE)
    u_shape = name != method
    if name not in METHODS:  # pretrain: the whole model is counted, however it is cut
        name = names_of(lambda each: each.gradients)[0]
    given = {
        "split.method": name,
        "split.cut": options.cut or "",
        "model.family": model,
        "split.labels_at_home": u_shape,
    }
    sets = [f"{key}={json.dumps(value)}" for key, value in given.items()]
    names = {"split.method": "--method", "split.cut": "--cut", "model.family": "--model"}
    return shapes_of(described(load(None, [*overrides, *sets], names)))
