"""Tokenizes samples with the base's tokenizer, and makes batches of them. NumPy, no torch.

A sequence is token ids and a mask of those that are trained, cut at `context`:

    lm          begin, prompt, completion, end; the completion is trained, or all
    lm, chat    by the tokenizer's chat template; the assistant's turns, with their calls of tools
                and their reasoning, are trained, or all
    classify    the text with the tokenizer's special tokens; nothing is predicted but the label
    kto         as lm of a completion, which is good or bad
    pairs       two sequences for a sample, prompt and chosen, prompt and rejected (dpo, simpo,
                orpo, reward)

Without a template prompt and completion are tokenized apart: a prompt alone then has the tokens
that it was trained with. A rendered chat is tokenized whole, as it is for generation.

The first token of a sequence has nothing in front that could predict it, so it is never trained,
and the number of trained tokens is the number of predicted ones.

The attention mask marks padding, never its id: where a tokenizer pads with its end token,
the ids cannot tell the end of a completion, which is trained, from padding.
"""

import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import numpy as np
import numpy.typing as npt

from fsl_async.config.settings_tuning import Objective, TrainedOn
from fsl_async.errors import DataError, one_line
from fsl_async.learn.data.partition import epoch_order
from fsl_async.learn.tune.records import GOOD, PAIRS, Records, Sample, Skips, used_line
from fsl_async.learn.tune.templates import Chat, Rendered, UnfitError, chat_of, render, text_turn
from fsl_async.roles.phrasing import counted

Ints = npt.NDArray[np.int64]

UNTRAINED = -100
"""Label of a token that is not predicted, as torch's cross entropy ignores it."""

_ROWS_AT_ONCE = 256
"""Texts in one call of the tokenizer, which is fast only in batches."""
_CHARACTERS_AT_ONCE = 1 << 20
"""Characters of rendered chats in one call, or one chat: lists of tokens take 100 times as much."""

_SOURCES = itertools.count()

Part = tuple[str | int, bool]
"""A text, or a token id, and whether it is trained."""
Sequenced = Rendered | list[Part]
"""A sequence, before it is tokenized."""


@attrs.frozen(slots=True, eq=False)
class TokenBatch:
    """Sequences of B samples, padded to the longest: two a sample of pairs, (chosen, rejected).

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
    goods: Ints | None = attrs.field(default=None, kw_only=True)
    """Of kto: 1 where a sample is good, else 0, int64 (B,)."""

    @property
    def trained(self) -> int:
        """Trained tokens; of classify: samples."""
        return int(np.count_nonzero(self.labels != UNTRAINED))


@attrs.frozen(slots=True, eq=False)
class Tokenized:
    """Tokenized samples, or some of them: parts share the tokens.

    ids: int32, all sequences on end; trained: bool, for each; starts: int64 (sequences + 1,).
    labels: int64, one for each sample, of classify and kto (1 is good); else None.
    predicts_label: whether labels are what is predicted, as of classify.
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
    predicts_label: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def tokens(self) -> int:
        """Trained tokens of an epoch; of classify: samples."""
        if self.predicts_label:
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
        goods = None if self.labels is None else self.labels[rows]
        if self.predicts_label:
            assert goods is not None
            labels, goods = goods, None
        return TokenBatch(ids, mask, labels, rows, self.source, goods=goods)

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
        for places in drawn_places(groups, size, seed=seed, name=name, start=start):
            yield self.batch(places)


def drawn_places(
    groups: Sequence[Ints], size: int, *, seed: int, name: str, start: int
) -> Iterator[Ints]:
    """Yield `size` places without end; see `Tokenized.shuffled`. groups: drawn from in turns."""
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
        yield np.concatenate(taken)


def tokenize(
    records: Records,
    tokenizer: Any,
    objective: Objective,
    *,
    context: int,
    trained_on: TrainedOn = "completion",
    labels: Sequence[str] = (),
    one_each: bool = False,
) -> Tokenized:
    """Read and tokenize all samples.

    tokenizer: of transformers. context: tokens at which sequences are cut, at their end; samples
    without a trained token within it are left out and counted. labels: names, for the summary.
    one_each: of a chat whose turns are several samples only the last one is used, so that a row is
    a sample, as differential privacy counts.
    Raises DataError: as `Records`, or when no sample is left.
    """
    if objective == "grpo":
        raise DataError("tune.objective = grpo learns from rewards: this reads answers of records")
    if objective != "lm":
        trained_on = "completion"
    store = _Store(tokenizer, context)
    samples = iter(records)
    while chunk := list(itertools.islice(samples, _ROWS_AT_ONCE)):
        if objective == "classify":
            store.add_texts(chunk)
        else:
            rows = [store.sequences(sample, trained_on) for sample in chunk]
            rows = [row[-1:] for row in rows] if one_each else rows
            store.add_sequences(rows, [sample.label for sample in chunk])
    found = store.finish(objective, labels, records)
    if not len(found):
        raise DataError(
            f"data {records.path!r}: no row is left to train on: {found.summary}; if rows are too"
            " long, raise tune.context"
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
        self._cut = self._used = self._left_out = 0
        self._refused = Skips()
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
        self._used += len(samples)
        self._labels.extend(sample.label for sample in samples)
        for ids in found:
            # Decoders are read at the last token that is no padding, which transformers finds by
            # its id.
            while len(ids) > 1 and ids[-1] == self._pad:
                ids.pop()
            self._add(ids, bytes(len(ids)))

    def sequences(self, sample: Sample, trained_on: TrainedOn) -> list[list[Sequenced]]:
        """Return a row's samples, each a list of sequences; none where the template refuses it."""
        try:
            return _sequences(sample, self._tokenizer, trained_on)
        except UnfitError as error:
            self._refused.add(str(error))
            return []

    def add_sequences(self, rows: Sequence[list[list[Sequenced]]], labels: Sequence[int]) -> None:
        """Tokenize the samples of rows and add them; a row may give several, or none.

        labels: of the rows; -1: it has none.
        """
        every = [sequence for row in rows for sample in row for sequence in sample]
        parts = [part for one in every if isinstance(one, list) for part, _ in one]
        encoded = iter(self._encode([part for part in parts if isinstance(part, str)]))
        whole = iter(self._encode_whole([one for one in every if isinstance(one, Rendered)]))
        for row, label in zip(rows, labels, strict=True):
            was, left_out = len(self._starts), 0
            for sample in row:
                found = [
                    next(whole) if isinstance(one, Rendered) else self._joined(one, encoded)
                    for one in sample
                ]
                for _, mask in found:
                    mask[:1] = bytes(len(mask[:1]))
                kept = [(ids[: self._context], mask[: self._context]) for ids, mask in found]
                if all(any(mask) for _, mask in kept):
                    self._cut += any(len(ids) > self._context for ids, _ in found)
                    for ids, mask in kept:
                        self._add(ids, mask)
                    self._labels.extend([label] if label >= 0 else [])
                else:
                    left_out += 1
            self._used += len(self._starts) > was
            if row and len(self._starts) == was:
                self._refused.add(f"without a trained token within {self._context:,} tokens")
            else:
                self._left_out += left_out

    def finish(self, objective: Objective, labels: Sequence[str], records: Records) -> Tokenized:
        """What was added, with its line for people."""
        width: Literal[1, 2] = 2 if objective in PAIRS else 1
        samples = (len(self._starts) - 1) // width
        found = Tokenized(
            np.frombuffer(self._ids, np.int32) if self._ids else np.empty(0, np.int32),
            np.frombuffer(self._trained, np.bool_),
            np.frombuffer(self._starts, np.int64),
            np.array(self._labels, np.int64) if objective in {"classify", "kto"} else None,
            np.arange(samples),
            width,
            self._pad,
            "",
            next(_SOURCES),
            predicts_label=objective == "classify",
        )
        return attrs.evolve(found, summary=self._summary(found, labels, records))

    def _summary(self, found: Tokenized, labels: Sequence[str], records: Records) -> str:
        reasons = ", ".join(filter(None, map(str, (records.skips, self._refused))))
        used = used_line(self._used, records.rows + records.skips.total, reasons)
        parts = [f"{records.name}: {records.columns.described}, {used}"]
        if len(found) != self._used or self._left_out:
            parts.append(counted(len(found), "sample"))
        if self._left_out:
            parts.append(
                f"{self._left_out:,} more without a trained token within {self._context:,} tokens"
            )
        parts.append(f"{self._cut:,} cut at {self._context:,} tokens")
        if not found.predicts_label:
            share = found.tokens / max(1, len(found.ids))
            parts.append(f"{share:.0%} of tokens trained".replace("%", " %"))
        if found.labels is not None:
            counts = zip(labels or GOOD, found.label_counts(len(labels or GOOD)), strict=True)
            shares = ((name, count / max(1, len(found))) for name, count in counts)
            parts.append(", ".join(f"{name} {share * 100:.0f} %" for name, share in shares))
        return one_line("; ".join(parts))

    def _joined(
        self, parts: Sequence[Part], encoded: Iterator[list[int]]
    ) -> tuple[list[int], bytearray]:
        """Join parts to token ids and a mask; `encoded` gives the ids of their texts in order."""
        ids: list[int] = []
        mask = bytearray()
        for part, trained in parts:
            if isinstance(part, int):
                more = {_BEGIN: self._begin, _END: [] if self._end is None else [self._end]}[part]
            else:
                more = next(encoded)
            ids += more
            mask += bytes([trained]) * len(more)
        return ids, mask

    def _encode_whole(self, chats: Sequence[Rendered]) -> Iterator[tuple[list[int], bytearray]]:
        """Yield token ids and mask of rendered chats; a token is trained if any of it is."""
        if not getattr(self._tokenizer, "is_fast", False):  # it gives no offsets
            for chat in chats:
                parts = chat.cut()
                yield self._joined(parts, iter(self._encode([text for text, _ in parts])))
            return
        places_of = self._places([chat.text for chat in chats])
        for chat, (ids, places) in zip(chats, places_of, strict=True):
            mask = bytearray(len(ids))
            spans = iter(chat.spans)
            span = next(spans, None)
            for number, (start, stop) in enumerate(places):
                while span is not None and span[1] <= start:
                    span = next(spans, None)
                mask[number] = span is not None and max(stop, start + 1) > span[0]
            yield ids, mask

    def _places(self, texts: list[str]) -> Iterator[tuple[list[int], list[tuple[int, int]]]]:
        """Yield token ids of each text, and where the tokens are in it.

        As lists they are large, so only some are held.
        """
        at = 0
        while at < len(texts):
            start, size = at, 0
            while at < len(texts) and size < _CHARACTERS_AT_ONCE:
                size += len(texts[at])
                at += 1
            found = self._call(texts[start:at], return_offsets_mapping=True)
            yield from zip(found["input_ids"], found["offset_mapping"], strict=True)

    def _add(self, ids: Sequence[int], mask: bytes | bytearray) -> None:
        self._ids.extend(ids)
        self._trained += mask
        self._starts.append(len(self._ids))

    def _encode(
        self, texts: list[str], *, special: bool = False, cut: bool = False
    ) -> list[list[int]]:
        length = self._context if cut else None
        found = self._call(texts, add_special_tokens=special, truncation=cut, max_length=length)
        ids: list[list[int]] = found.get("input_ids", [])
        return ids

    def _call(self, texts: list[str], **more: Any) -> Mapping[str, Any]:
        if not texts:
            return {}
        # Not verbose: it warns of texts above the model's length, which are cut here.
        given = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        found: Mapping[str, Any] = self._tokenizer(texts, **given | more)
        return found


_BEGIN, _END = -1, -2
"""Parts that are the tokenizer's begin and end tokens, where it has them."""


def _sequences(sample: Sample, tokenizer: Any, trained_on: TrainedOn) -> list[list[Sequenced]]:
    """Return a row's samples: with lm of one sequence each, with dpo of two.

    Raises UnfitError.
    """
    if sample.text:
        return [[[(_BEGIN, False), (sample.text, True), (_END, True)]]]
    has_template = bool(getattr(tokenizer, "chat_template", None))
    answers = [sample.completion, sample.rejected] if sample.rejected else [sample.completion]
    chats = sample.chats
    if not chats and has_template:
        asked = text_turn("user", sample.prompt)
        chats = tuple(
            chat_of([asked, text_turn("assistant", answer)], start=1) for answer in answers
        )
    is_pair = len(answers) == 2 or len(chats) == 2
    all_trained = trained_on == "all" and not is_pair
    if has_template:
        found = [render(chat, tokenizer, whole=all_trained, once=is_pair) for chat in chats]
        return [[one[0] for one in found]] if is_pair else [[one] for one in found[0]]
    plain = [_plain_chat(chat) for chat in chats]
    plain = plain or [_plain_parts(sample.prompt, answer) for answer in answers]
    if all_trained:
        plain = [[(part, True) for part, _ in sequence] for sequence in plain]
    return [[*plain]]


def _plain_parts(prompt: str, answer: str) -> list[Part]:
    """Prompt, completion, end; a line break between texts that would run into each other."""
    apart = not prompt or prompt[-1:].isspace() or answer[:1].isspace()
    head: list[Part] = [(prompt if apart else f"{prompt}\n", False)] if prompt else []
    return [(_BEGIN, False), *head, (answer, True), (_END, True)]


def _plain_chat(chat: Chat) -> list[Part]:
    """A chat for a tokenizer without a template: "User: ...", a line for each turn."""
    if chat.tools or any({"tool_calls", "reasoning_content"} & set(turn) for turn in chat.turns):
        raise UnfitError("with tools or reasoning, and the tokenizer has no chat template")
    parts: list[Part] = [(_BEGIN, False)]
    for number, turn in enumerate(chat.turns):
        if turn["role"] == "assistant":
            trained = number in chat.trained
            parts += [("Assistant:", False), (f" {turn.get('content', '')}", trained)]
            parts += [(_END, trained), ("\n", False)]
        else:
            parts.append((f"{turn['role'].capitalize()}: {turn['content']}\n", False))
    while parts[-1] == ("\n", False):
        parts.pop()
    return parts
