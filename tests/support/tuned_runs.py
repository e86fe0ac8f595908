"""Tiny base models, and run directories of runs that tuned them, made by the store."""

import attrs
import numpy as np
import torch

from fsl_async.config.fixed import keep_settings
from fsl_async.config.load import load
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models.adapters import Adapters
from fsl_async.learn.models.peft_folder import write_json
from fsl_async.learn.tune.base import load_base
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta
from fsl_async.store.rules.adapters import adapter_rule_named
from fsl_async.store.store import Store
from fsl_async.tools.exports import _byte_tokenizer
from fsl_codecs import CodecSpec, encode

SEED = 5
LOSSLESS = CodecSpec(format="fp32")
SIZES = {
    "llama": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "bert": {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64,
    },
}  # fmt: skip
"""Sizes by model type; the vocabulary is that of bytes."""


def write_base(folder, kind, template=""):
    """Write a base with random weights and a tokenizer of bytes; return its folder."""
    import transformers

    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    config = transformers.AutoConfig.for_model(kind, vocab_size=256, **none, **SIZES[kind])
    torch.manual_seed(1)
    auto = (
        transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    )
    model = auto.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            # Random norms and biases too, so that a lost one shows.
            weight.add_(0.1 * torch.randn(weight.shape))
    model.save_pretrained(str(folder))
    write_json(folder / "tokenizer.json", _byte_tokenizer())
    table = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": chr(0x100)}
    write_json(
        folder / "tokenizer_config.json", table | ({"chat_template": template} if template else {})
    )
    return folder


def adapted(base, tune, site_rank=None):
    """(model, its ModelWeights, the base): as a client of that rank has them."""
    found = load_base(base, tune.objective, labels=tune.label_names, seed=SEED)
    how = {"seed": SEED, "heads": found.drawn, "site_rank": site_rank}
    adapters = Adapters(found.model, tune, adapter_rule_named(tune.rule), **how)
    return found.model, ModelWeights(found.model, adapters.view), found


def make_run(run_dir, base, *settings):
    """Make a run at version 2 that tuned the base; return its TuneConfig."""
    config = load(None, [f"run.seed={SEED}", "tune.method=lora", *settings])
    tune = config.tune
    _, weights, _ = adapted(base, tune)
    make_versions(run_dir, weights, config)
    return tune


def make_versions(run_dir, weights, config, versions=2):
    """Make versions 0 ... `versions` of the weights, each a random step from the one before."""
    store = Store(run_dir)
    store.recover()
    start = np.empty(weights.manifest.values, np.float32)
    weights.copy_out(start)
    store.begin_initial(weights.manifest)
    chunks = [slice(*weights.manifest.chunk_range(at)) for at in range(weights.manifest.chunks)]
    for index, chunk in enumerate(chunks):
        store.write_initial(index, encode(start[chunk], LOSSLESS))
    digest = store.finish_initial().digest
    rng = np.random.default_rng(2)
    for version in range(1, versions + 1):
        delta = Delta(DeltaKey("a", version, version - 1, version), digest, 100, 5)
        step = (0.05 * rng.standard_normal(len(start))).astype(np.float32)
        store.spool_begin(delta)
        step[weights.manifest.weights :] = np.abs(step[weights.manifest.weights :])
        for index, chunk in enumerate(chunks):
            store.spool_write(delta.key, index, encode(step[chunk], LOSSLESS))
        store.spool_finish(delta.key)
        digest = store.commit(version, [MergedDelta(delta, 0, 1.0)], 1.0).digest
    store.finish_snapshot()
    store.close()
    keep_settings(run_dir, config, -1)


def logits_of(model, rows=3, length=9):
    """Logits of fixed token ids."""
    ids = torch.arange(rows * length).reshape(rows, length) * 37 % 250 + 1
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


def tune_of(**values):
    """Settings of tuning."""
    return attrs.evolve(TuneConfig(method="lora"), **values)
