"""Exports that need torch: models that a run trained whole, and bases merged with adapters."""

from __future__ import annotations

import glob
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsl_async.config.load import from_tables
from fsl_async.config.rules import LANGUAGE_FAMILIES
from fsl_async.errors import FslError, TaskError, one_line
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.client.shards import plain_name
from fsl_async.learn.client.statistics import SpectralNorms, recalibrate
from fsl_async.learn.data.facts import Facts, context_of
from fsl_async.learn.models import hf
from fsl_async.learn.models.families import hf_sizes
from fsl_async.learn.models.gpt import GPT, VOCABULARY, GPTConfig, gpt_config
from fsl_async.learn.models.peft_folder import write_tensors
from fsl_async.learn.user_code import load_function, own_failure
from fsl_async.store.model.manifest import Manifest
from fsl_async.tools import exports

if TYPE_CHECKING:
    from pathlib import Path

    from fsl_async.tools.kept_run import KeptRun, Loaded

_EMBEDDINGS = ("transformer.wte.weight", "model.embed_tokens.weight",
               "model.decoder.embed_tokens.weight")  # fmt: skip


def built_in_gpt(run: KeptRun) -> GPTConfig | None:
    """Sizes of the run's model where it is the built-in GPT, else None."""
    tables = run.settings()
    if tables.get("model", {}).get("family", "gpt") != "gpt":
        return None
    try:
        sizes = gpt_config(tables)
    except FslError:
        return None
    with torch.device("meta"):
        model = GPT(sizes)
    return sizes if ModelWeights(model).layout.tensors == run.manifest.tensors else None


def write_model(folder: Path, run: KeptRun, loaded: Loaded) -> str:
    """Write a model that the run trained whole. Returns what it is, for people."""
    sizes = built_in_gpt(run)
    if sizes is not None:
        exports.write_gpt(folder, run, loaded, sizes)
        what = "a Hugging Face folder (ArceeForCausalLM, which computes what the built-in GPT does)"
        return what if sizes.vocabulary == VOCABULARY else f"{what}; copy your tokenizer.json there"
    family = str(run.settings().get("model", {}).get("family", "gpt"))
    if family in LANGUAGE_FAMILIES[1:]:
        config = _family_config(run, family)
        if config is not None:
            config.save_pretrained(str(folder))
            write_tensors(folder / exports.WEIGHTS, run.named(loaded))
            exports.write_note(folder, run, loaded, "model", family=family)
            return f"a Hugging Face folder ({family}); its tokenizer is not the run's to know"
        exports.write_plain(folder, run, loaded, family=family)
        return f"tensors by name: they are not those of a whole {family}, which has other parts"
    exports.write_plain(folder, run, loaded, family="" if family == "gpt" else family)
    return "tensors by name: load them into your own model with load_state_dict"


def write_recalibrated(folder: Path, run: KeptRun, loaded: Loaded, text: str) -> str:
    """Write the tensors by name, with the statistics of batch norm measured on the version.

    text: names the user's function, which returns the model and batches of inputs, as a training
    task would make them. Buffers that are no part of the run are written too. Returns what it is,
    for people. Raises TaskError.
    """
    function = load_function("--recalibrate", text, ())
    try:
        given: Any = function()
    except Exception as error:  # noqa: BLE001 - of the user's code; others go on
        raise own_failure(error) or error from None
    if not (isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)):
        raise TaskError(f"--recalibrate {text!r} must return (model, batches)")
    model, batches = given
    buffers = run.settings().get("exchange", {}).get("buffers", "average")
    weights = ModelWeights(model, buffers=buffers)
    wanted = [one.name for one in run.manifest.tensors]
    if set(wanted) < {plain_name(name) for name in model.state_dict()}:  # fed.attach(exchange=...)
        weights = ModelWeights(model, [glob.escape(name) for name in wanted], buffers=buffers)
    if weights.layout.tensors != run.manifest.tensors:
        other = Manifest(run.manifest.tensors)
        raise TaskError(
            f"--recalibrate {text!r} returns another model than the run's:"
            f" {weights.layout.difference(other)} (here: the model; there: the run)"
        )
    weights.copy_in(loaded.vector)
    SpectralNorms(model, weights.layout).restore()
    try:
        count = recalibrate(model, batches)
    except FslError:
        raise
    except Exception as error:  # noqa: BLE001 - of the user's code, or of torch for its batch
        problem = f"{type(error).__name__}: {one_line(str(error))}"
        failure = TaskError(f"--recalibrate {text!r}: the model does not take a batch: {problem}")
        raise own_failure(error) or failure from None
    listed = model.state_dict()
    tensors = dict(run.named(loaded)) | {
        plain_name(name): one.detach().float().cpu().numpy()
        for name, one in model.named_buffers()
        if name in listed and one.is_floating_point()
    }
    exports.write_plain(folder, run, loaded, tensors, recalibrated=count)
    return f"tensors by name, batch norm measured over {count} batch{'es' * (count > 1)}"


def _family_config(run: KeptRun, family: str) -> Any | None:
    """The transformers config of the run's model; None where the tensors are not all of it."""
    shapes = {one.name: one.shape for one in run.manifest.tensors}
    vocabulary = next((shapes[name][0] for name in _EMBEDDINGS if name in shapes), 0)
    if not vocabulary:
        return None
    config = from_tables(run.settings())
    facts = Facts((context_of(config),), vocabulary, language=True)
    with torch.device("meta"):
        model: Any = hf.build(family, hf_sizes(config, facts))
    if ModelWeights(model).layout.tensors != run.manifest.tensors:
        return None
    found = model.config
    found.architectures = [type(model).__name__]
    return found


def write_merged(
    folder: Path, run: KeptRun, loaded: Loaded, base: Path, head: Path | None = None
) -> None:
    """Write the base with the adapters in its weights, fp32, and its tokenizer.

    head: see `Tuned`. Raises ConfigError: the base cannot be loaded, or is another one.
    """
    from fsl_async.learn.tune.base import Tuned, save_base

    tune = run.tuning()
    tuned = Tuned(base, tune, int(run.settings()["run"]["seed"]), run.manifest, head)
    tuned.load(loaded.vector)
    save_base(tuned.merge(), folder)
    exports.write_note(folder, run, loaded, "merged", rule=tune.rule, objective=tune.objective)
