"""The process of `demo lora` that makes the base, and after the run trains without federation.

    python -m fsl_async.tools.demo.lora_work RUN_DIR BASE SEED STEPS

Imports transformers and peft once for two: its second process is a fork, and waits for its part of
the comparison. With STEPS 0 the base is there. Prints a record MADE when it is, reads ORDERS in
RUN_DIR as soon as the demo has written it, and prints what `compare` does. An error is a line
that begins with "error: ", and the exit code. Needs the extra `hf`.

The base is a small Llama that has read Python's standard library: its tokenizer (byte-level BPE)
and its weights are made from the source in this Python's own folder, and nothing is downloaded.
Training without federation is the built-in task, with plain LoRA of the run's rank.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fsl_async.config.load import load, resolved, to_dict
from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import FslError
from fsl_async.learn.client.fed import LocalFed
from fsl_async.learn.client.fed_base import ClientContext
from fsl_async.learn.client.optimizers import build_optimizer
from fsl_async.learn.models.hf import collector_paused, extra
from fsl_async.learn.tune.base import Base, Tuned, quiet, save_base
from fsl_async.learn.tune.objectives import objective_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.task import train
from fsl_async.learn.tune.tokens import tokenize
from fsl_async.roles.phrasing import figure
from fsl_async.tools.demo.lora import MADE, ORDERS, digest_of
from fsl_async.tools.kept_run import KeptRun

VOCABULARY = 1024
WIDTH, LAYERS, HEADS, CONTEXT = 96, 2, 4, 128
BATCH, WARMUP = 4, 20
TOKENIZER_BYTES, CORPUS_BYTES = 300_000, 500_000
"""Bytes of source that make the tokenizer, and that the model trains on."""
LINES = 5
"""Lines of progress."""
_SPECIAL = ("<pad>", "<s>", "</s>")
PAD, BEGIN, END = range(3)


def make_base(folder: Path, *, seed: int, steps: int, say: Callable[[str], None]) -> None:
    """Train the model for `steps` steps and write it to `folder`."""
    source = _source(CORPUS_BYTES)
    tokenizer = _tokenizer(source[:TOKENIZER_BYTES])
    ids = torch.tensor(_encoded(tokenizer, source))
    model = _model(seed)
    weights = sum(weight.numel() for weight in model.parameters())
    say(
        f"the base: a Llama of {weights / 1e6:.1f} M parameters learns Python from"
        f" {len(source) / 1e6:.1f} MB of the standard library's source"
    )
    _train(model, ids, seed=seed, steps=steps, say=say)
    model.eval()
    save_base(Base(model, tokenizer, (), CONTEXT), folder)


def _source(size: int) -> str:
    """The standard library's source, without tests, from files in an order by name."""
    texts: list[str] = []
    total = 0
    for path in _files(Path(sysconfig.get_path("stdlib"))):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        texts.append(text)
        total += len(text)
        if total >= size:
            break
    return "\n".join(texts)[:size]


def _files(root: Path) -> Iterator[Path]:
    # Modules of the first level, then packages; pydoc_data is the English that the demo tunes on.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data"}
    yield from sorted(root.glob("*.py"))
    for path in sorted(root.glob("*/**/*.py")):
        if not skipped & set(path.relative_to(root).parts):
            yield path


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


def _train(
    model: Any, ids: torch.Tensor, *, seed: int, steps: int, say: Callable[[str], None]
) -> None:
    """Muon and AdamW on random windows; rates fall linearly to a tenth."""
    optimizer = build_optimizer(model, {})
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARMUP) * (1 - 0.9 * step / steps)
    )
    chance = np.random.Generator(np.random.Philox(key=seed))
    begun = time.monotonic()
    model.train()
    for step in range(1, steps + 1):
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
            say(f"the base: step {step} of {steps}, loss {figure(loss.item(), 2)}, {spent:.0f} s")


Tables = dict[str, dict[str, Any]]


def tables_of(job: Mapping[str, Any]) -> Tables:
    """The run's configuration, with the base's folder."""
    tables = to_dict(resolved(load(None, job["overrides"])))
    tables["tune"] = {**tables["tune"], "base": job["base"]}
    return tables


def alone(tables: Tables, name: str, data: str, steps: int) -> LocalFed:
    """Train `steps` steps on the records of a file, by the built-in task."""
    rank = TuneConfig(**tables["tune"]).adapter_rank
    own = {
        **tables,
        "data": {**tables["data"], "path": data},
        # What a rule changes between versions has no meaning in one process.
        "tune": {**tables["tune"], "rule": "fedit", "rank": rank},
        # A process that knows its end trains best with a rate that falls towards it.
        "train": {**tables["train"], "schedule": "wsd"},
    }
    context = ClientContext(name, seed=tables["run"]["seed"], config=own, log=lambda _: None)
    fed = LocalFed(context, steps=steps)
    train(fed)
    return fed


def compare(job: Mapping[str, Any], tell: Callable[[dict[str, Any]], None]) -> None:
    """Do a job. `tell` gets a record for each model: name, loss in nats a token, steps, tokens.

    job: the run's settings (overrides) and directory, the base's folder, the test's records, jobs
    with name, data and steps, and whether to measure the base and the run.
    """
    tables, kept = tables_of(job), KeptRun(Path(job["run"]))
    tune = TuneConfig(**tables["tune"])
    tuned = Tuned(Path(tune.base), tune, tables["run"]["seed"], kept.manifest)
    tested = tokenize(
        Records(job["test"], tune.objective),
        tuned.base.tokenizer,
        tune.objective,
        context=min(tune.context, tuned.base.context or tune.context),
        trained_on=tune.trained_on,
    )
    objective = objective_of(tune)

    def report(name: str, model: torch.nn.Module, **more: Any) -> None:
        loss = objective.evaluate(model, tested, size=16)["eval_loss"]
        tell({"name": name, "loss": loss, **more})

    if job["measures"]:
        with tuned.adapters.disabled():
            report("base", tuned.model, test_tokens=tested.tokens, test_records=len(tested))
        newest = kept.load(kept.versions()[-1])
        assert newest is not None
        tuned.load(newest.vector)
        report("federated", tuned.model, version=newest.record.version)
    for one in job["jobs"]:
        fed = alone(tables, one["name"], one["data"], one["steps"])
        assert fed.model is not None
        report(one["name"], fed.model, steps=one["steps"], tokens=int(fed.status()["tokens"]))


_TICK_S = 0.1


def main(arguments: list[str]) -> None:
    """Make the base, wait for the orders, compare."""
    torch.set_num_threads(1)
    run_dir, base, seed, steps = Path(arguments[0]), arguments[1], *map(int, arguments[2:])
    with collector_paused():
        extra("peft")
        _ = extra("transformers").LlamaForCausalLM
    # A fork is safe while there is one thread. Elsewhere the second process imports on its own.
    kind: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    second = kind.Process(target=guarded, args=(_second, run_dir, os.getpid()), daemon=True)
    second.start()
    if steps:
        make_base(Path(base), seed=seed, steps=steps, say=_print)
    _print_record({"name": MADE, "digest": digest_of(Path(base))})
    compare(_order(run_dir, 0, os.getppid()), _print_record)
    second.join()
    if second.exitcode:
        raise SystemExit(second.exitcode)


def _second(run_dir: Path, parent: int) -> None:
    """Compare by the second order. parent: the process that began this one."""
    if sys.platform == "linux":
        # PR_SET_PDEATHSIG, as in the supervisor: end when the parent does.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    torch.set_num_threads(1)
    compare(_order(run_dir, 1, parent), _print_record)


def _order(run_dir: Path, number: int, parent: int) -> dict[str, Any]:
    """Wait for an order of the demo. Ends this process when its parent is gone."""
    while not (run_dir / ORDERS).exists():
        time.sleep(_TICK_S)
        if os.getppid() != parent:
            raise SystemExit
    order: dict[str, Any] = json.loads((run_dir / ORDERS).read_text(encoding="utf-8"))[number]
    return order


def guarded(call: Any, *arguments: Any) -> None:
    """Call, and print an error as the demo reads it."""
    try:
        call(*arguments)
    except FslError as error:
        _print(f"error: {error.message}")
        raise SystemExit(int(error.exit_code)) from None


def _print_record(record: Mapping[str, Any]) -> None:
    _print(json.dumps(record))


def _print(line: str) -> None:
    # In one piece: the other process prints too.
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    guarded(main, sys.argv[1:])
