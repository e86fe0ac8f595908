"""Text that a run's model or an export writes, piece by piece. Imports torch, so import it late."""

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from fsl_async.config.settings_tuning import HEADS
from fsl_async.errors import ConfigError, RunDirError, UsageError, one_line
from fsl_async.learn.client.buffers import ModelWeights
from fsl_async.learn.models.gpt import GPT, VOCABULARY
from fsl_async.learn.models.hf import extra
from fsl_async.learn.models.peft_folder import ADAPTER_CONFIG
from fsl_async.tools.export_models import built_in_gpt
from fsl_async.tools.exports import CONFIG, NOTE
from fsl_async.tools.kept_run import KeptRun

_LOOK_BACK = 6
"""Tokens of the prompt that are decoded with the first new one, for the space between them."""
_LOST = "\ufffd"


@frozen
class Sampling:
    """How tokens are chosen. temperature: 0 takes the likeliest. tokens: at most so many."""

    tokens: int
    temperature: float
    seed: int

    def choice(self) -> Callable[[Tensor], int]:
        """A function of logits (V,) that returns the next token."""
        rng = torch.Generator().manual_seed(self.seed)

        def choose(logits: Tensor) -> int:
            if not self.temperature:
                return int(logits.argmax())
            shares = torch.softmax(logits.double() / self.temperature, -1)
            return int(torch.multinomial(shares, 1, generator=rng))

        return choose


class Bytes:
    """The built-in GPT."""

    def __init__(self, model: GPT) -> None:
        self._model = model.eval()

    def pieces(self, prompt: str, sampling: Sampling, *, raw: bool) -> Iterator[str]:
        """Write on after the prompt; bytes that are no UTF-8 become U+FFFD."""
        del raw  # there is no chat format
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # An empty prompt is the beginning of a line.
        ids = list(prompt.encode("utf-8", "replace")) or [ord("\n")]
        choose, context = sampling.choice(), self._model.config.context
        with torch.no_grad():
            for _ in range(sampling.tokens):
                logits: Tensor = self._model(torch.tensor([ids[-context:]]))[0, -1]
                ids.append(choose(logits))
                if piece := decoder.decode(bytes(ids[-1:])):
                    yield piece
        if piece := decoder.decode(b"", final=True):
            yield piece


class Chat:
    """A causal language model of transformers and its tokenizer.

    context: most tokens of a sequence; 0: as many as there are.
    """

    def __init__(self, model: Any, tokenizer: Any, context: int) -> None:
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._context = context

    def pieces(self, prompt: str, sampling: Sampling, *, raw: bool) -> Iterator[str]:
        """Answer the prompt in the tokenizer's chat format or, without one or raw, write on."""
        ids = self._ids(prompt, raw=raw)
        limit = self._context or len(ids) + sampling.tokens
        ids = ids[-max(1, limit - 1) :]
        choose, ends = sampling.choice(), self._ends()
        shown, read = max(0, len(ids) - _LOOK_BACK), len(ids)
        fresh, cache = ids, None
        with torch.no_grad():
            for _ in range(min(sampling.tokens, limit - len(ids))):
                found = self._model(
                    input_ids=torch.tensor([fresh]), past_key_values=cache, use_cache=True
                )
                token = choose(found.logits[0, -1].float())
                if token in ends:
                    break
                ids, fresh, cache = [*ids, token], [token], found.past_key_values
                before, after = self._text(ids[shown:read]), self._text(ids[shown:])
                if len(after) > len(before) and not after.endswith(_LOST):
                    yield after[len(before) :]
                    shown, read = read, len(ids)
        if rest := self._text(ids[shown:])[len(self._text(ids[shown:read])) :]:
            yield rest

    def _ids(self, prompt: str, *, raw: bool) -> list[int]:
        tokenizer = self._tokenizer
        if getattr(tokenizer, "chat_template", None) and not raw:
            turns = [{"role": "user", "content": prompt}]
            try:
                text = tokenizer.apply_chat_template(
                    turns, tokenize=False, add_generation_prompt=True
                )
            except Exception as error:  # templates are programs, and raise what they like
                raise ConfigError(
                    f"the chat template refuses the prompt ({one_line(str(error))[:200]}): give"
                    " --raw"
                ) from error
            found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            found = tokenizer(prompt)["input_ids"]
            if found[-1:] == [tokenizer.eos_token_id]:
                found = found[:-1]
        begin = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        found = list(found) or [one for one in begin if one is not None][:1]
        if not found:
            raise UsageError("this model cannot begin without a prompt: give --prompt")
        return found

    def _ends(self) -> set[int]:
        """Tokens that end an answer."""
        config = getattr(self._model, "generation_config", None)
        found = getattr(config, "eos_token_id", None)
        ends = set(found) if isinstance(found, list) else {found}
        return {one for one in {*ends, self._tokenizer.eos_token_id} if one is not None}

    def _text(self, ids: list[int]) -> str:
        found: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return found


def from_run(run_dir: Path, version: int | None, base: Path | None) -> tuple[Bytes | Chat, str]:
    """What writes with a version of a run, and what it is, for people.

    Raises UsageError, RunDirError, ConfigError.
    """
    run = KeptRun(run_dir)
    tune = run.tuning()
    if tune.is_on:
        if tune.objective in HEADS:
            raise UsageError("this run has labels or rewards for outputs: its model writes no text")
        if base is None:
            raise UsageError("this run tunes a base model: give --base MODEL")
        from fsl_async.learn.tune.base import Tuned

        loaded = run.chosen(version)
        tuned = Tuned(base, tune, int(run.settings()["run"]["seed"]), run.manifest)
        tuned.load(loaded.vector)
        found: Bytes | Chat = Chat(tuned.model, tuned.base.tokenizer, tuned.base.context)
    else:
        sizes = built_in_gpt(run)
        if sizes is None:
            raise UsageError("this run's model is not the built-in GPT: export it, and load that")
        if sizes.vocabulary != VOCABULARY:
            raise UsageError(
                "this run trains on tokens of a tokenizer: export it, copy the tokenizer.json into"
                " that folder, and generate from there"
            )
        loaded = run.chosen(version)
        model = GPT(sizes)
        ModelWeights(model).copy_in(loaded.vector)
        found = Bytes(model)
    return found, f"version {loaded.record.version}"


def from_export(folder: Path, base: Path | None) -> tuple[Chat, str]:
    """What writes with an export, or with a Hugging Face folder, and what it is, for people.

    Raises UsageError, RunDirError, ConfigError.
    """
    from fsl_async.learn.tune.base import load_base, quiet

    if _classifies(folder):
        raise UsageError(f"{folder} classifies: its model writes no text")
    if not (folder / ADAPTER_CONFIG).is_file():
        if not (folder / CONFIG).is_file():
            raise RunDirError(
                f"{folder} is neither a run directory with a ledger nor an export with"
                f" {ADAPTER_CONFIG} or {CONFIG}"
            )
        loaded = load_base(folder, "lm")
        return Chat(loaded.model, loaded.tokenizer, loaded.context), _described(folder)
    if base is None:
        raise UsageError(f"{folder} holds adapters only: give --base MODEL")
    loaded = load_base(base, "lm")
    try:
        with quiet():
            model = extra("peft").PeftModel.from_pretrained(loaded.model, str(folder))
    except (ValueError, RuntimeError, KeyError, OSError) as error:
        raise ConfigError(
            f"{folder} does not fit base {str(base)!r}: {one_line(str(error))[:200]}"
        ) from error
    return Chat(model, loaded.tokenizer, loaded.context), _described(folder)


def _classifies(folder: Path) -> bool:
    """Whether a folder that `fsl-node export` wrote holds a classifier."""
    try:
        with (folder / NOTE).open("rb") as file:
            return bool(json.load(file)["objective"] == "classify")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _described(folder: Path) -> str:
    try:
        with (folder / NOTE).open("rb") as file:
            return f"version {int(json.load(file)['version'])}"
    except (OSError, ValueError, KeyError, TypeError):
        return str(folder)
