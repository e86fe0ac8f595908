"""Draws answers from a model, and has the site's own function rate them.

A site has prompts, and a function of its own in a file, which never leaves it:

    def reward(prompt, answer): return float(...)          # the prompt's text, or its messages
    def reward(prompt, answer, row): return float(...)     # row: all columns of the prompt's record

Which answers are drawn follows from the run's seed, the site's name, the round and the step, so a
site that repeats a round gives the same ones. Numbers are of Philox, the same on every device.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import DataError, TaskError, TaskRaisedError, one_line
from fsl_async.learn.models.forward import evaluating
from fsl_async.learn.models.hf import extra
from fsl_async.learn.tune.objectives.base import token_logps
from fsl_async.learn.tune.objectives.grpo import AnswerBatch, advantages_of
from fsl_async.learn.tune.records import Records, Sample, Skips, used_line
from fsl_async.learn.tune.templates import UnfitError
from fsl_async.learn.tune.tokens import UNTRAINED, drawn_places
from fsl_async.learn.user_code import load_function, own_failure
from fsl_async.roles.sync.messages import Rollout
from fsl_async.store.rules.adapters.draws import stream

Prompted = str | list[dict[str, Any]]
"""A prompt as a reward function gets it: a text, or messages."""
Reward = Callable[[Prompted, str, dict[str, Any]], float]
Uniforms = Callable[[int], NDArray[np.float64]]
"""Returns so many numbers from 0 to 1, the next ones of a stream."""

EVALUATED_BATCH = 32
REWARD_ERROR = 1e-6
"""How far rewards of one answer may be apart, as a share: functions are computed in fp64."""


@attrs.frozen(slots=True, eq=False)
class Prompt:
    """A prompt, its tokens, and the record that it is of."""

    ids: tuple[int, ...]
    given: Prompted
    row: dict[str, Any]


@attrs.frozen(slots=True, eq=False)
class Group:
    """Answers to a prompt that another client has drawn. logps: float32, of all their tokens."""

    prompt: list[int]
    answers: list[list[int]]
    logps: NDArray[np.float32]
    rewards: NDArray[np.float32]


class Prompts:
    """The prompts of a site's records. most: tokens of a prompt at most.

    Raises DataError where none can be used.
    """

    def __init__(self, records: Records, tokenizer: Any, most: int) -> None:
        refused = Skips()
        self._found: list[Prompt] = []
        for sample in records:
            try:
                ids = _prompt_ids(sample, tokenizer, most)
            except UnfitError as error:
                refused.add(str(error))
                continue
            given = list(sample.chats[0].turns) if sample.chats else sample.prompt
            self._found.append(Prompt(tuple(ids), given, dict(sample.row)))
        total = records.rows + records.skips.total
        reasons = ", ".join(filter(None, map(str, (records.skips, refused))))
        used = used_line(len(self._found), total, reasons)
        self.summary = f"{records.name}: {records.columns.described}, {used}"
        if not self._found:
            raise DataError(f"data {records.path!r}: no prompt can be used: {reasons}")

    def __len__(self) -> int:
        return len(self._found)

    def at(self, places: Sequence[int]) -> list[Prompt]:
        """The prompts at these places."""
        return [self._found[place] for place in places]

    def split(self, holdout: float) -> tuple[range, range]:
        """Return the places that are trained on, and the last ones, which are held out."""
        held = min(len(self) - 1, max(1, int(len(self) * holdout))) if holdout else 0
        return range(len(self) - held), range(len(self) - held, len(self))


def load_reward(text: str) -> Reward:
    """Return the function that --reward names, FILE.py or FILE.py:FUNCTION.

    Its errors, and what is no finite number, are TaskErrors in one line.
    """
    if not text:
        raise TaskError(
            "this run rewards answers by a function of each site: give this client --reward FILE.py"
            " with a function reward(prompt, answer)"
        )
    named = text if ":" in text else f"{text}:reward"
    try:
        function = load_function("--reward", named, ("prompt", "answer"))
        takes_row = len(inspect.signature(function).parameters) > 2
    except TaskError as error:
        try:
            function = load_function("--reward", named, ("prompt", "answer", "row"))
        except TaskError:
            raise error from None
        takes_row = True

    def rated(prompt: Prompted, answer: str, row: dict[str, Any]) -> float:
        try:
            given: Any = function(*(prompt, answer, row) if takes_row else (prompt, answer))
        except Exception as error:  # noqa: BLE001 - of the user's code
            raise own_failure(error) or error from None
        with suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(found := float(given)):
                return found
        shown = one_line(repr(given))[:80]
        raise TaskRaisedError(f"{named} returned {shown}: it must return a finite number", "")

    return rated


class Rater:
    """Draws and rates the answers of one site. tune: the run's."""

    def __init__(self, model: Any, tokenizer: Any, reward: Reward, tune: TuneConfig) -> None:
        self._model, self._tokenizer, self._reward, self._tune = model, tokenizer, reward, tune
        made = model.generation_config.eos_token_id
        ends = {*(made if isinstance(made, list) else [made]), tokenizer.eos_token_id} - {None}
        if not ends:
            raise TaskError("this base has no token that ends an answer: it cannot learn by grpo")
        self._ends = sorted(ends)

    def batch(self, prompts: Sequence[Prompt], uniforms: Uniforms) -> AnswerBatch:
        """Return a group of answers to each prompt, with their advantages.

        Its metrics: reward, the mean; flat, the share of groups without a difference, which teach
        nothing; answer_tokens, the mean.
        """
        group = self._tune.group
        drawn = self.draw([one for one in prompts for _ in range(group)], uniforms)
        rewards = np.array(self.rate(prompts, drawn), np.float32).reshape(-1, group)
        flat = float(np.mean(rewards.max(1) == rewards.min(1)))
        metrics = {"reward": float(rewards.mean()), "flat": flat}
        metrics["answer_tokens"] = float(np.mean([len(one) for one in drawn]))
        repeated = [one.ids for one in prompts for _ in range(group)]
        return batch_of(repeated, drawn, advantages_of(rewards).reshape(-1), metrics)

    def groups(self, prompts: Sequence[Prompt], uniforms: Uniforms, version: int) -> list[Rollout]:
        """Return a group of rated answers to each prompt, as other clients get it.

        Log-probabilities are of the forward pass that trains, in its dtype.
        """
        group = self._tune.group
        drawn = self.draw([one for one in prompts for _ in range(group)], uniforms)
        rewards = self.rate(prompts, drawn)
        repeated = [one.ids for one in prompts for _ in range(group)]
        zeros = np.zeros(len(drawn), np.float32)
        with torch.no_grad(), evaluating(self._model):
            logps = token_logps(self._model, batch_of(repeated, drawn, zeros, {}))[0]
        parts = np.split(logps.float().cpu().numpy(), np.cumsum([len(one) for one in drawn])[:-1])
        rows = [
            [np.array(ids, "<u4").tobytes(), part.astype("<f4").tobytes(), reward]
            for ids, part, reward in zip(drawn, parts, rewards, strict=True)
        ]
        return [
            Rollout(
                version,
                np.array(one.ids, "<u4").tobytes(),
                json.dumps({"prompt": one.given, "row": one.row}, default=str).encode(),
                rows[place * group : (place + 1) * group],
            )
            for place, one in enumerate(prompts)
        ]

    def group_of(self, message: Rollout) -> Group | None:
        """Return a group that another client has drawn; None: it is nonsense, or rated otherwise.

        One answer is rated again, which its sender cannot foresee.
        """
        prompt = np.frombuffer(message.prompt, "<u4").tolist()
        drawn = [np.frombuffer(ids, "<u4").tolist() for ids, _, _ in message.answers]
        logps = [np.frombuffer(part, "<f4") for _, part, _ in message.answers]
        rewards = [reward for _, _, reward in message.answers]
        longest = len(prompt) + max(map(len, drawn))
        largest = max(itertools.chain(prompt, *drawn))
        # Vocabulary and context of the model: beyond them it would end with an error.
        is_possible = largest < self._model.get_input_embeddings().weight.shape[0]
        is_possible &= longest <= self._tune.context
        is_possible &= all(np.isfinite(part).all() and part.max() <= 0 for part in logps)
        if not is_possible:
            return None
        if self._tune.same_rewards:
            place = secrets.randbelow(len(drawn))
            try:
                record = json.loads(message.record)
                asked = Prompt(tuple(prompt), record["prompt"], dict(record["row"]))
            except (ValueError, KeyError, TypeError, RecursionError):
                return None
            (own,) = self.rate([asked], [drawn[place]])
            if abs(own - rewards[place]) > REWARD_ERROR * max(1.0, abs(own)):
                return None
        return Group(prompt, drawn, np.concatenate(logps), np.array(rewards, np.float32))

    def rate(self, prompts: Sequence[Prompt], drawn: Sequence[Sequence[int]]) -> list[float]:
        """Return the reward of each answer; the answers of a prompt are on end."""
        each = len(drawn) // len(prompts)
        return [
            self._reward(one.given, self._tokenizer.decode(ids, skip_special_tokens=True), one.row)
            for one, ids in zip((p for p in prompts for _ in range(each)), drawn, strict=True)
        ]

    def greedy_reward(self, prompts: Sequence[Prompt]) -> float:
        """Return the mean reward of the likeliest answers."""
        found: list[float] = []
        for start in range(0, len(prompts), EVALUATED_BATCH):
            some = prompts[start : start + EVALUATED_BATCH]
            found += self.rate(some, self.draw(some, None))
        return sum(found) / max(1, len(found))

    def draw(self, prompts: Sequence[Prompt], uniforms: Uniforms | None) -> list[list[int]]:
        """Return an answer to each prompt, token ids with the end; None: the likeliest tokens.

        The model is in evaluation mode: what it says with dropout is not what is trained.
        """
        width = max(len(one.ids) for one in prompts)
        device = next(self._model.parameters()).device
        ids = torch.full((len(prompts), width), self._ends[0])
        mask = torch.zeros_like(ids)
        for row, one in enumerate(prompts):
            ids[row, width - len(one.ids) :] = torch.tensor(one.ids)
            mask[row, width - len(one.ids) :] = 1
        transformers = extra("transformers")
        own = self._model.generation_config
        # Else the folder's taste, such as a penalty for repetition, decides what is drawn.
        self._model.generation_config = transformers.GenerationConfig(
            max_new_tokens=self._tune.answer_tokens,
            do_sample=False,
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
        )
        chooser = [] if uniforms is None else [_Drawn(uniforms)]
        try:
            with torch.no_grad(), evaluating(self._model):
                found: Tensor = self._model.generate(
                    input_ids=ids.to(device),
                    attention_mask=mask.to(device),
                    logits_processor=transformers.LogitsProcessorList(chooser),
                )
        finally:
            self._model.generation_config = own
        return [self._ended(row) for row in found[:, width:].tolist()]

    def _ended(self, ids: list[int]) -> list[int]:
        last = next((place for place, one in enumerate(ids) if one in self._ends), len(ids) - 1)
        return ids[: last + 1]


class _Drawn:
    """Leaves one token of each row: the one at which its shares pass the next uniform number."""

    def __init__(self, uniforms: Uniforms) -> None:
        self._uniforms = uniforms

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """See transformers.LogitsProcessor."""
        shares = torch.softmax(scores.double(), -1).cumsum(-1)
        drawn = torch.from_numpy(self._uniforms(len(scores))).to(shares.device)
        tokens = torch.searchsorted(shares, (drawn * shares[:, -1])[:, None], right=True)
        tokens = tokens.clamp(max=scores.shape[-1] - 1)
        return torch.full_like(scores, -math.inf).scatter_(1, tokens, 0.0)


def batch_of_groups(groups: Sequence[Group]) -> AnswerBatch:
    """Return the batch of answers that other clients have drawn and rated."""
    advantages = [advantages_of(one.rewards[None])[0] for one in groups]
    flat = float(np.mean([one.rewards.max() == one.rewards.min() for one in groups]))
    drawn = [ids for one in groups for ids in one.answers]
    rewards = np.concatenate([one.rewards for one in groups])
    metrics = {"reward": float(rewards.mean()), "flat": flat, "received": 1.0}
    made = batch_of(
        [one.prompt for one in groups for _ in one.answers],
        drawn,
        np.concatenate(advantages),
        metrics,
    )
    return attrs.evolve(made, logps=np.concatenate([one.logps for one in groups]))


def uniforms_of(seed: int, name: str) -> Uniforms:
    """Return the stream of uniform numbers with 53 bits of this name."""
    source = stream(seed, name)

    def numbers(count: int) -> NDArray[np.float64]:
        return (source.random_raw(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    return numbers


def rounds_of_places(
    places: range, size: int, *, seed: int, name: str, steps: int, version: Callable[[], int]
) -> Iterator[tuple[list[int], str]]:
    """Yield the prompts of each step without end, and the name of its stream of numbers.

    version: of the run at this site. The same step of the same round has the same of both.
    """
    while True:
        number = max(version(), 0)
        drawn = drawn_places(
            [np.arange(len(places))], size, seed=seed, name=name, start=number * steps
        )
        for step in itertools.count():
            if max(version(), 0) != number:
                break
            yield [places[place] for place in next(drawn)], f"answers/{name}/{number}/{step}"


def batch_of(
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    advantages: NDArray[np.float32],
    metrics: dict[str, float],
) -> AnswerBatch:
    """Return the batch of these answers, padded at their ends."""
    width = max(len(one) + len(two) for one, two in zip(prompts, answers, strict=True))
    ids = np.zeros((len(prompts), width), np.int64)
    mask, labels = np.zeros_like(ids), np.full_like(ids, UNTRAINED)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        stop = len(prompt) + len(answer)
        ids[row, :stop] = [*prompt, *answer]
        mask[row, :stop] = 1
        labels[row, len(prompt) : stop] = answer
    rows = np.arange(len(prompts))
    return AnswerBatch(ids, mask, labels, rows, -1, advantages=advantages, metrics=metrics)


def _prompt_ids(sample: Sample, tokenizer: Any, most: int) -> list[int]:
    """Return the tokens of a prompt, as completions are trained after it. Raises UnfitError."""
    if getattr(tokenizer, "chat_template", None):
        turns = sample.chats[0].turns if sample.chats else None
        turns = turns or ({"role": "user", "content": sample.prompt},)
        try:
            text = tokenizer.apply_chat_template(
                list(turns), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise as they like
            raise UnfitError("refused by the chat template") from error
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    elif sample.chats:
        raise UnfitError("of messages, and the tokenizer has no chat template")
    else:
        apart = sample.prompt[-1:].isspace()
        text = sample.prompt if apart else f"{sample.prompt}\n"
        found = tokenizer(text, add_special_tokens=False)["input_ids"]
        begin, empty = tokenizer.bos_token_id, tokenizer("")["input_ids"]
        found = [begin, *found] if begin is not None and empty[:1] == [begin] else found
    if not 0 < len(found) <= most:
        raise UnfitError(f"longer than {most:,} tokens" if found else "without a token")
    return found
