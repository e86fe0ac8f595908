"""The training function of `demo air`, and the digital channel that it compares with."""

import functools
import inspect
import json
import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fsl_async.learn.client.fed import Fed
from fsl_async.learn.data.counter import derived_seed, permutation
from fsl_async.store.rules.air import Channel
from fsl_async.tools.demo.lora import python_topics
from fsl_codecs import CodecSpec, decode, encode

FEATURES, CHARACTERS, RECORDS, HELD_OUT = 1024, 12, 6000, 2000
"""Values of a record's vector, its characters, records of each label, and held-out ones of both."""
STEPS, BATCH, RATE = 10, 16, 0.05
"""Steps of a site in a round, records in a step, and the learning rate."""


@functools.cache
def records() -> tuple[Tensor, Tensor]:
    """Fragments of Python (0) and English (1), in turns: counts of three characters; labels."""
    code = "".join(map(inspect.getsource, (json.decoder, functools, inspect)))
    english = "".join(text for _, text in sorted(python_topics().items()))
    rows = np.zeros((2 * RECORDS, FEATURES), np.float32)
    for label, given in enumerate((code, english)):
        text = " ".join(given.split())
        starts = permutation(0, f"air/{label}", len(text) - CHARACTERS)[:RECORDS]
        for row, start in zip(rows[label::2], starts, strict=True):
            for at in range(start, start + CHARACTERS - 2):
                row[zlib.crc32(text[at : at + 3].encode()) % FEATURES] += 1
    return torch.from_numpy(rows), torch.arange(2 * RECORDS) % 2


def accuracy(weights: NDArray[np.float32]) -> float:
    """The share of held-out records that a head tells apart. weights: float32 (values,)."""
    rows, labels = (one[:HELD_OUT] for one in records())
    head = nn.Linear(FEATURES, 2)
    with torch.inference_mode():
        nn.utils.vector_to_parameters(torch.from_numpy(weights), head.parameters())
        return float((head(rows).argmax(1) == labels).double().mean())


def train(fed: Fed) -> None:
    """Tune a head to tell English from Python; a site has 10 to 90 % English records."""
    (number, sites), (rows, labels) = fed.part, records()
    share = 0.1 + 0.8 * number / max(1, sites - 1)
    rng = torch.Generator().manual_seed(derived_seed(fed.settings.run.seed, "air", number))
    head, loss = nn.Linear(FEATURES, 2), torch.zeros(())
    for one in head.parameters():
        nn.init.zeros_(one)
    fed.attach(head)
    for _ in fed.rounds():
        optimizer = torch.optim.AdamW(head.parameters(), RATE)
        for _ in range(STEPS):
            # Records of a label have every second number.
            pairs = torch.randint(HELD_OUT // 2, RECORDS, (BATCH,), generator=rng)
            drawn = 2 * pairs + (torch.rand(BATCH, generator=rng) < share)
            loss = nn.functional.cross_entropy(head(rows[drawn]), labels[drawn])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if not fed.end_round(samples=STEPS * BATCH, metrics={"loss": loss.item()}):
            break


class Digital(Channel):
    """Digital sending at the capacity of a channel without fading, log2(1 + snr) / 2 bits a use.

    A value takes 2.2 bits. Values are dealt to the sites by chance, as many as fit; where all fit
    more than once, some are of several sites.
    """

    coding = CodecSpec(format="uniform", block_values=128, step_log2=0)
    bits = 2.2

    def begin(self, seed: int, version: int, sites: Sequence[str]) -> NDArray[np.bool_]:
        """See `Channel.begin`."""
        self._seed, self._name, self.power = seed, f"digital/{version}", 1.0
        return super().begin(seed, version, sites)

    def transmit(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """See `Channel.transmit`."""
        sites, values = vectors.shape
        capacity = math.log2(1 + 10 ** (self.settings.snr_db / 10)) / 2
        fitting = int(values * min(sites, capacity / self.bits))
        order = np.resize(permutation(self._seed, self._name, values), fitting)
        total = np.zeros(values, np.float32)
        times = np.zeros_like(total)
        for vector, places in zip(vectors, np.array_split(order, sites), strict=True):
            if len(places):
                total[places] += decode(encode(vector[places], self.coding))
                times[places] += 1
        total *= sites
        total /= np.maximum(1, times)
        return total
