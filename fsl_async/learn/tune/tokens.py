"""Tokenizes samples with the base's tokenizer, and makes batches of them. NumPy, no torch.

A sequence is token ids and a mask of those that are trained, cut at `context`:

    lm          begin, prompt, completion, end; the completion is trained, or all
    lm, chat    by the tokenizer's chat template; the assistant's turns are trained, or all
    classify    the text with the tokenizer's special tokens; nothing is predicted but the label
    dpo         two sequences for a sample, prompt and chosen, prompt and rejected

Prompt and completion are tokenized apart: a prompt alone then has the tokens that it was trained
with. The first token of a sequence has nothing in front that could predict it, so it is never
trained, and the number of trained tokens is the number of predicted ones.

The attention mask marks padding, never its id: where a tokenizer pads with its end token,
the ids cannot tell the end of a completion, which is trained, from padding.
"""

import itertools
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from fsl_async.config.settings_tuning import Objective, TrainedOn
from fsl_async.errors import DataError, one_line
from fsl_async.learn.data.partition import epoch_order
from fsl_async.learn.tune.records import Message, Records, Sample

Ints = npt.NDArray[np.int64]

UNTRAINED = -100
"""Label of a token that is not predicted, as torch's cross entropy ignores it."""

_ROWS_AT_ONCE = 256
"""Texts in one call of the tokenizer, which is fast only in batches."""

_SOURCES = itertools.count()

Part = tuple[str | int, bool]
"""A text, or a token id, and whether it is trained."""


@attrs.frozen(slots=True, eq=False)
class TokenBatch:
    """Sequences of B samples, padded to the longest: two a sample with dpo, (chosen, rejected).

    ids, mask: int64 (sequences, tokens); mask is 1 where a token is real.
    labels: of classify int64 (B,); else the ids, int64 (sequences, tokens), UNTRAINED where a token
    is not trained. The token at position t is predicted from those before it: shift by one.
    rows: int64 (B,), the samples' numbers within `source`, the number of the tokenized data.
    """

    ids: Ints
    mask: Ints
    labels: Ints
    rows: Ints
    source: int

    @property
    def trained(self) -> int:
        """Trained tokens; of classify: samples."""
        return int(np.count_nonzero(self.labels != UNTRAINED))


@attrs.frozen(slots=True, eq=False)
class Tokenized:
    """Tokenized samples, or some of them: parts share the tokens.

    ids: int32, all sequences on end; trained: bool, for each; starts: int64 (sequences + 1,).
    labels: int64, one for each sample, of classify; else None.
    rows: int64, the samples that are in this part, by number.
    pad: id of padding. summary: one line for people.
    """

    ids: npt.NDArray[np.int32]
    trained: npt.NDArray[np.bool_]
    starts: Ints
    labels: Ints | None
    rows: Ints
    width: Literal[1, 2]
    pad: int
    summary: str
    source: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Trained tokens of an epoch; of classify: samples."""
        if self.labels is not None:
            return len(self)
        if not len(self):
            return 0
        # No sequence is empty, so reduceat counts each by itself.
        counts = np.add.reduceat(self.trained, self.starts[:-1], dtype=np.int64)
        return int(counts.reshape(-1, self.width)[self.rows].sum())

    def label_counts(self, classes: int) -> list[int]:
        """Samples of each label. Raises DataError for data without labels."""
        if self.labels is None:
            raise DataError("these data have no labels to count")
        found: list[int] = np.bincount(self.labels[self.rows], minlength=classes).tolist()
        return found

    def split(self, holdout: float) -> tuple["Tokenized", "Tokenized | None"]:
        """Divide into samples for training and the last part, which is held out (None: nothing).

        holdout: its share, 0 to 0.5. Where samples have labels it is the last part of each label:
        files are often sorted by them. At least one sample is held out where there are two.
        """
        if not holdout or len(self) < 2:
            return self, None
        groups = [np.arange(len(self))]
        if self.labels is not None:
            mine = self.labels[self.rows]
            groups = [np.flatnonzero(mine == label) for label in np.unique(mine)]
        held = [group[len(group) - int(len(group) * holdout) :] for group in groups]
        last = np.sort(np.concatenate(held))
        if not last.size:
            last = np.array([len(self) - 1])
        kept = np.delete(np.arange(len(self)), last)
        return self.select(kept), self.select(last)

    def select(self, places: npt.ArrayLike) -> "Tokenized":
        """The samples at these places of this part."""
        return attrs.evolve(self, rows=self.rows[np.asarray(places, np.int64)])

    def batch(self, places: npt.ArrayLike) -> TokenBatch:
        """The samples at these places, padded to the longest of them."""
        rows = self.rows[np.asarray(places, np.int64)]
        sequences = (rows[:, None] * self.width + np.arange(self.width)).reshape(-1)
        lengths = self.starts[sequences + 1] - self.starts[sequences]
        shape = len(sequences), int(lengths.max(initial=1))
        ids = np.full(shape, self.pad, np.int64)
        labels = np.full(shape, UNTRAINED, np.int64)
        for place, sequence in enumerate(sequences.tolist()):
            start, stop = self.starts[sequence], self.starts[sequence + 1]
            ids[place, : stop - start] = self.ids[start:stop]
            trained = self.trained[start:stop]
            labels[place, : stop - start][trained] = self.ids[start:stop][trained]
        mask = (np.arange(shape[1]) < lengths[:, None]).astype(np.int64)
        if self.labels is not None:
            labels = self.labels[rows]
        return TokenBatch(ids, mask, labels, rows, self.source)

    def batches(self, size: int) -> Iterator[TokenBatch]:
        """All samples once, in order; the last batch may be smaller."""
        for start in range(0, len(self), size):
            yield self.batch(np.arange(start, min(start + size, len(self))))

    def balance(self, classes: int) -> float:
        """How equal the labels are: 0 for one label, 1 for equally many of each of `classes`.

        (1 - sum of p_c^2) * C / (C - 1), with p_c the share of label c.
        """
        counts = np.array(self.label_counts(classes), np.float64)
        shares = counts / max(1.0, counts.sum())
        return float(1.0 - np.square(shares).sum()) * classes / (classes - 1)

    def shuffled(
        self, size: int, *, seed: int, name: str, start: int = 0, balanced: bool = False
    ) -> Iterator[TokenBatch]:
        """Endless batches of `size` samples; each epoch has all samples once, in its own order.

        The order follows from (seed, name of the client, epoch). start: batches to leave out, so
        that a client continues where it was. A batch may hold the end of one epoch and the
        beginning of the next. balanced: an epoch has as many samples of each label as of the most
        frequent one, in turns; those of others repeat. Raises DataError where there is no sample.
        """
        if not len(self):
            raise DataError("no sample is left to train on")
        groups = [np.arange(len(self))]
        if balanced and self.labels is not None:
            mine = self.labels[self.rows]
            groups = [np.flatnonzero(mine == label) for label in np.unique(mine)]
        longest = max(map(len, groups))

        def ordered(epoch: int) -> Ints:
            orders = [group[epoch_order(seed, name, epoch, len(group))] for group in groups]
            return np.stack([np.resize(order, longest) for order in orders], 1).reshape(-1)

        epoch, place = divmod(start * size, longest * len(groups))
        order = ordered(epoch)
        while True:
            taken = [order[place : place + size]]
            count = len(taken[0])
            place += count
            while count < size:
                epoch += 1
                order = ordered(epoch)
                taken.append(order[: size - count])
                place = len(taken[-1])
                count += place
            yield self.batch(np.concatenate(taken))


def tokenize(
    records: Records,
    tokenizer: Any,
    objective: Objective,
    *,
    context: int,
    trained_on: TrainedOn = "completion",
    labels: Sequence[str] = (),
) -> Tokenized:
    """Read and tokenize all samples.

    tokenizer: of transformers. context: tokens at which sequences are cut, at their end; samples
    without a trained token within it are left out and counted. labels: names, for the summary.
    Raises DataError: as `Records`, or when no sample is left.
    """
    store = _Store(tokenizer, context)
    samples = iter(records)
    while chunk := list(itertools.islice(samples, _ROWS_AT_ONCE)):
        if objective == "classify":
            store.add_texts(chunk)
        else:
            store.add_parts([_parts(sample, tokenizer, trained_on) for sample in chunk])
    found = store.finish(objective, labels, records)
    if not len(found):
        raise DataError(
            f"data {str(records.path)!r}: no sample has a trained token within {context} tokens:"
            " raise tune.context"
        )
    return found


class _Store:
    """Tokens as they come; compact, because a file may hold hundreds of millions."""

    def __init__(self, tokenizer: Any, context: int) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._ids = array("i")
        self._trained = bytearray()
        self._starts = array("q", [0])
        self._labels = array("q")
        self._cut = self._empty = self._refused = 0
        self._end = tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
        # With attention masked the id of padding is never seen; it must only be a valid one.
        self._pad = next((each for each in (pad, self._end) if each is not None), 0)
        empty = self._encode([""], special=True)[0]
        begin = tokenizer.bos_token_id
        self._begin = [begin] if begin is not None and empty[:1] == [begin] else []

    def add_texts(self, samples: Sequence[Sample]) -> None:
        """Texts of classify."""
        found = self._encode([sample.text for sample in samples], special=True)
        long = [place for place, ids in enumerate(found) if len(ids) > self._context]
        self._cut += len(long)
        # Encoders expect their end token, which a plain cut would take away.
        cut = self._encode([samples[place].text for place in long], special=True, cut=True)
        for place, ids in zip(long, cut, strict=True):
            found[place] = ids
        for sample, ids in zip(samples, found, strict=True):
            # Decoders are read at the last token that is no padding, which transformers finds by
            # its id.
            while len(ids) > 1 and ids[-1] == self._pad:
                ids.pop()
            self._add(ids, bytes(len(ids)))
            self._labels.append(sample.label)

    def add_parts(self, samples: Sequence[list[list[Part]] | None]) -> None:
        """The sequences of samples, in parts; None: the chat template refused the sample."""
        texts = [
            part
            for sample in samples
            for sequence in sample or ()
            for part, _ in sequence
            if isinstance(part, str)
        ]
        encoded = iter(self._encode(texts, special=False))
        for sample in samples:
            if sample is None:
                self._refused += 1
                continue
            whole = [self._sequence(sequence, encoded) for sequence in sample]
            self._cut += any(len(ids) > self._context for ids, _ in whole)
            kept = [(ids[: self._context], mask[: self._context]) for ids, mask in whole]
            if not all(any(mask) for _, mask in kept):
                self._empty += 1
                continue
            for ids, mask in kept:
                self._add(ids, mask)

    def finish(self, objective: Objective, labels: Sequence[str], records: Records) -> Tokenized:
        """What was added, with its line for people."""
        width: Literal[1, 2] = 2 if objective == "dpo" else 1
        samples = (len(self._starts) - 1) // width
        found = Tokenized(
            np.frombuffer(self._ids, np.int32) if self._ids else np.empty(0, np.int32),
            np.frombuffer(self._trained, np.bool_),
            np.frombuffer(self._starts, np.int64),
            np.array(self._labels, np.int64) if objective == "classify" else None,
            np.arange(samples),
            width,
            self._pad,
            "",
            next(_SOURCES),
        )
        return attrs.evolve(found, summary=self._summary(found, labels, records))

    def _summary(self, found: Tokenized, labels: Sequence[str], records: Records) -> str:
        parts = [f"{records.name}: {records.columns.described}", _counted(len(found), "row")]
        parts.append(f"{self._cut:,} cut at {self._context:,} tokens")
        if self._empty:
            parts.append(f"{self._empty:,} skipped (no trained token)")
        if self._refused:
            parts.append(f"{self._refused:,} skipped (refused by the chat template)")
        if records.skipped:
            parts.append(f"{records.skipped:,} skipped (the first: {records.first_skip})")
        if found.labels is None:
            share = found.tokens / max(1, len(found.ids))
            parts.append(f"{share:.0%} of tokens trained".replace("%", " %"))
        else:
            for name, count in zip(labels, found.label_counts(len(labels)), strict=True):
                parts.append(f"{name} {count / max(1, len(found)):.0%}".replace("%", " %"))
        return one_line(", ".join(parts))

    def _sequence(
        self, parts: Sequence[Part], encoded: Iterator[list[int]]
    ) -> tuple[list[int], bytearray]:
        ids: list[int] = []
        mask = bytearray()
        for part, trained in parts:
            if isinstance(part, int):
                more = {_BEGIN: self._begin, _END: [] if self._end is None else [self._end]}[part]
            else:
                more = next(encoded)
            ids += more
            mask += bytes([trained]) * len(more)
        mask[:1] = bytes(len(mask[:1]))
        return ids, mask

    def _add(self, ids: Sequence[int], mask: bytes | bytearray) -> None:
        self._ids.extend(ids)
        self._trained += mask
        self._starts.append(len(self._ids))

    def _encode(self, texts: list[str], *, special: bool, cut: bool = False) -> list[list[int]]:
        if not texts:
            return []
        # Not verbose: it warns of texts above the model's length, which are cut here.
        found: list[list[int]] = self._tokenizer(
            texts,
            add_special_tokens=special,
            return_attention_mask=False,
            truncation=cut,
            max_length=self._context if cut else None,
            verbose=False,
        )["input_ids"]
        return found


_BEGIN, _END = -1, -2
"""Parts that are the tokenizer's begin and end tokens, where it has them."""


def _parts(sample: Sample, tokenizer: Any, trained_on: TrainedOn) -> list[list[Part]] | None:
    """The sequences of a sample; None where the chat template refuses it."""
    if sample.text:
        return [[(_BEGIN, False), (sample.text, True), (_END, True)]]
    answers = [sample.completion, sample.rejected] if sample.rejected else [sample.completion]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    found: list[list[Part]] = []
    for answer in answers:
        messages = sample.messages
        if not messages and has_template:
            messages = (Message("user", sample.prompt),)
        if answer and messages:
            messages = (*messages, Message("assistant", answer))
        if not messages:
            sequence = _plain_parts(sample.prompt, answer)
        elif has_template:
            rendered = _template_parts(messages, tokenizer, last_only=bool(answer))
            if rendered is None:
                return None
            sequence = rendered
        else:
            sequence = _plain_chat(messages, last_only=bool(answer))
        if trained_on == "all" and not sample.rejected:
            sequence = [(part, True) for part, _ in sequence]
        found.append(sequence)
    return found


def _plain_parts(prompt: str, answer: str) -> list[Part]:
    """Prompt, completion, end; a line break between texts that would run into each other."""
    apart = not prompt or prompt[-1:].isspace() or answer[:1].isspace()
    head: list[Part] = [(prompt if apart else f"{prompt}\n", False)] if prompt else []
    return [(_BEGIN, False), *head, (answer, True), (_END, True)]


def _plain_chat(messages: Sequence[Message], *, last_only: bool) -> list[Part]:
    """A chat for a tokenizer without a template: "User: ...", a line for each turn."""
    parts: list[Part] = [(_BEGIN, False)]
    for number, message in enumerate(messages):
        if message.role == "assistant":
            trained = not last_only or number == len(messages) - 1
            parts += [("Assistant:", False), (f" {message.content}", trained), (_END, trained)]
            parts.append(("\n", False))
        else:
            parts.append((f"{message.role.capitalize()}: {message.content}\n", False))
    while parts[-1] == ("\n", False):
        parts.pop()
    return parts


def _template_parts(
    messages: Sequence[Message], tokenizer: Any, *, last_only: bool
) -> list[Part] | None:
    """A chat in the tokenizer's format, cut where turns of the assistant begin and end.

    A turn begins where the chat before it, with the prompt for an answer, ends. Templates that
    write earlier turns differently from the last one train the last turn only.
    """
    turns = [{"role": one.role, "content": one.content} for one in messages]

    def render(count: int, *, asks: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            turns[:count], tokenize=False, add_generation_prompt=asks
        )
        return text

    # The assistant's first message has no prompt in front.
    answers = [n for n, one in enumerate(messages) if n and one.role == "assistant"]
    try:
        whole = render(len(turns), asks=False)
        spans = []
        for number in answers[-1:] if last_only else answers:
            before = render(number, asks=True)
            after = render(number + 1, asks=False) if turns[number + 1 :] else whole
            if whole.startswith(after) and after.startswith(before):
                spans.append((len(before), len(after)))
    except Exception:  # noqa: BLE001 - templates are programs, and raise what they like
        return None
    if not spans:
        return None
    parts: list[Part] = []
    at = 0
    for start, stop in spans:
        parts += [(whole[at:start], False), (whole[start:stop], True)]
        at = stop
    return [*(part for part in parts if part[0]), *([(whole[at:], False)] if whole[at:] else [])]


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
