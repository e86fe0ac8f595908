"""Chance by counters: which numbers dropout draws depends on the run's seed, on whose step it is and on its number.

Torch's dropout draws from a generator that the whole process shares, so what it draws would depend on everything that ran
before. Each forward pass here draws from a generator seeded by (seed, part, owner, number of the step): the same masks come in
lockstep, in free mode, and after a restart that restores nothing but the counter. The caller's generator is left as it was.

The shared generator belongs to the process, not to the thread, so threads of one process take turns.
"""

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN = threading.RLock()


def derived_seed(seed: int, *parts: str | int) -> int:
    """A seed in [0, 2^63) of its own for everything that has a name."""
    text = "\x1f".join(map(str, (seed, *parts)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


@contextmanager
def drawing(device: torch.device, seed: int, *parts: str | int) -> Iterator[None]:
    """Within it, draws on the CPU and on `device` come from `derived_seed(seed, *parts)`."""
    found = derived_seed(seed, *parts)
    cuda = [device] if device.type == "cuda" else []
    with _TURN, torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(found)
        if cuda:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(found)
        yield
