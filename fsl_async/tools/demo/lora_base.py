"""The base of `demo lora`: a small Llama that has read Python's standard library.

Its tokenizer (byte-level BPE) and its weights are made from the source in this Python's own folder,
and nothing is downloaded. Needs the extra `hf`.
"""

import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsl_async.learn.client.optimizers import build_optimizer
from fsl_async.learn.data.corpus import Corpus
from fsl_async.learn.models.hf import collector_paused, extra
from fsl_async.learn.tune.base import Base, quiet, save_base
from fsl_async.roles.phrasing import figure
from fsl_async.tools.demo.scenario import Stage

VOCABULARY = 1024
WIDTH, LAYERS, HEADS, CONTEXT = 96, 2, 4, 128
BATCH, WARMUP = 4, 20
TOKENIZER_BYTES, CORPUS_BYTES = 300_000, 500_000
"""Bytes of source that make the tokenizer, and that the model trains on."""
LINES = 5
"""Lines of progress."""
_SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BEGIN, END = range(3)


def make_base(folder: Path, *, seed: int, steps: int, stage: Stage) -> None:
    """Train the model for `steps` steps and write it to `folder`. Raises the stopper's error."""
    torch.set_num_threads(1)
    with collector_paused():
        extra("peft")
        _ = extra("transformers").LlamaForCausalLM
    source = _source(CORPUS_BYTES)
    tokenizer = _tokenizer(source[:TOKENIZER_BYTES])
    ids = torch.tensor(_encoded(tokenizer, source))
    model = _model(seed)
    weights = sum(weight.numel() for weight in model.parameters())
    stage.say(
        f"the base: a Llama of {weights / 1e6:.1f} M parameters learns Python from"
        f" {len(source) / 1e6:.1f} MB of the standard library's source"
    )
    _train(model, ids, seed=seed, steps=steps, stage=stage)
    model.eval()
    save_base(Base(model, tokenizer, (), CONTEXT), folder)


def _source(size: int) -> str:
    """The first bytes of the standard library's source, in the order of names."""
    corpus = Corpus.open(sysconfig.get_path("stdlib"), context=1)
    found = np.empty(min(size, corpus.bytes), np.uint8)
    corpus.read_into(0, found)
    return found.tobytes().decode(errors="replace")


def _tokenizer(source: str) -> Any:
    parts = extra("tokenizers")
    made = parts.Tokenizer(parts.models.BPE())
    made.pre_tokenizer = parts.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = parts.decoders.ByteLevel()
    trainer = parts.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(parts.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(source.splitlines(keepends=True), trainer)
    made.post_processor = parts.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BEGIN)]
    )
    return extra("transformers").PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=_SPECIAL[PAD],
        bos_token=_SPECIAL[BEGIN],
        eos_token=_SPECIAL[END],
        model_max_length=CONTEXT,
    )


def _encoded(tokenizer: Any, source: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The source as one sequence of ids."""
    lines = source.splitlines(keepends=True)
    pieces = ["".join(lines[start : start + 50]) for start in range(0, len(lines), 50)]
    with quiet():
        found = tokenizer(pieces, add_special_tokens=False)["input_ids"]
    return np.array([one for piece in found for one in piece], np.int64)


def _model(seed: int) -> Any:
    transformers = extra("transformers")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=CONTEXT,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config)


def _train(model: Any, ids: torch.Tensor, *, seed: int, steps: int, stage: Stage) -> None:
    """Muon and AdamW on random windows; rates fall linearly to a tenth."""
    optimizer = build_optimizer(model, {})
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / steps)
    )
    chance = np.random.Generator(np.random.Philox(key=seed))
    begun = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
        stage.check()
        starts = chance.integers(0, len(ids) - CONTEXT, BATCH)
        batch = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if step % max(1, steps // LINES) == 0:
            spent = time.monotonic() - begun
            done = f"the base: step {step} of {steps}, loss {figure(loss.item(), 2)}"
            stage.say(f"{done}, {spent:.0f} s")
