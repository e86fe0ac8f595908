"""The kinds of run that have a run directory here: settings, model, and the deltas of each version.

All of it is data. Deltas are integers over 2048, so they are the same fp32 numbers everywhere.
"""

from __future__ import annotations

import numpy as np
from attrs import field, frozen

CHUNK, BLOCK = 48, 16
"""Values in a chunk, so that these small models have several."""
CLIENTS = ("a", "b", "c", "odd")
TOKENS = {"a": 100, "b": 300, "c": 200, "odd": 50}
STEPS = {"a": 20, "b": 30, "c": 10, "odd": 20}
LAST = 5
"""The newest version; directories were left at version `LEFT`, the killed ones as well."""
LEFT = 3
PENDING = ("b", "c")
"""At version LEFT: the client whose delta is acknowledged, and the one whose is half sent."""

LAYERS = (("layer.weight", (9, 7)), ("layer.bias", (7,)))
BUFFERS = (("norm.mean", (5,)),)
FACTORS = (
    ("m.q.lora_A", (4, 11)),
    ("m.q.lora_B", (4, 9)),
    ("m.v.lora_A", (4, 7)),
    ("m.v.lora_B", (4, 13)),
    ("head.weight", (3, 17)),
)
PATCHED = (*FACTORS[:2], ("m.q.patch", (9, 11)), *FACTORS[2:4], ("m.v.patch", (13, 7)), FACTORS[4])

ALWAYS = (
    "sync.clients=4",
    "sync.min_clients=4",
    "store.keep_versions=2",
    # One thread, and no limit by norms: a sum of squares depends on the processor in its last bit.
    "codec.threads=1",
    "codec.up_step=0.088",
    "codec.down_step=0.088",
    "guard.clip_median=0",
)


@frozen
class Kind:
    """One kind of run. lag: versions by which the base of c's delta for version 3 is older."""

    name: str
    settings: tuple[str, ...] = ()
    weights: tuple[tuple[str, tuple[int, ...]], ...] = LAYERS
    buffers: tuple[tuple[str, tuple[int, ...]], ...] = ()
    lag: int = 0
    ranks: dict[str, int] = field(factory=dict)
    is_scalars: bool = False
    adopts: tuple[int, ...] = ()
    """Versions that are made of global weights instead of deltas."""

    def senders(self, version: int) -> list[tuple[str, int]]:
        """Return the clients that send a delta for a version, with the age of their base."""
        found = [("a", 0), ("b", 0)] if version % 2 else [("b", 0), ("c", 0)]
        if version == (1 if self.adopts else 2):  # not finite, so it ends in quarantine
            found.append(("odd", 0))
        if version == LEFT and self.lag:
            found.append(("c", self.lag))
        return found


TUNE = ("tune.method=lora", "tune.rank=4", "sync.trigger=rounds", "outer.optimizer=average")
KINDS = {
    one.name: one
    for one in (
        # A client of several ranks sends the frames of one client: its directory is this one, too.
        Kind("clock", buffers=BUFFERS, lag=1),
        Kind(
            "rounds",
            ("sync.trigger=rounds", "store.resident=false", "outer.optimizer=nesterov"),
        ),
        Kind("buffer", ("sync.trigger=buffer", "sync.buffer=2", "codec.down=e4m3"), lag=1),
        Kind("groups", ("outer.optimizer=nesterov",), buffers=BUFFERS, adopts=(2, 5)),
        Kind("fedit", (*TUNE, "tune.rule=fedit"), FACTORS),
        Kind("fedex", (*TUNE, "tune.rule=fedex"), PATCHED),
        Kind("bank", (*TUNE, "tune.rule=bank"), FACTORS, ranks={"a": 2, "b": 3, "c": 4}),
        Kind(
            "zeroth",
            ("tune.method=zeroth", "tune.zo_steps=2", "tune.zo_probes=3", "tune.zo_rate=0.01",
             "outer.optimizer=average"),
            is_scalars=True,
        ),
        Kind(
            "split",
            ("split.method=splitfed-v1", "model.family=resnet18", "outer.optimizer=average"),
        ),
    )
}  # fmt: skip


def numbers(count: int, seed: int) -> np.ndarray:
    """Return (count,) fp32 values between -1/16 and 1/16 that look random: integers over 2048."""
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B1)
    mixed = (mixed + np.uint64(seed * 0x85EBCA77)) % np.uint64(1 << 32)
    mixed ^= mixed >> np.uint64(15)
    mixed = mixed * np.uint64(0xC2B2AE3D) % np.uint64(1 << 32)
    whole = (mixed >> np.uint64(13)) % np.uint64(257)
    return (whole.astype(np.float32) - np.float32(128)) / np.float32(2048)


def delta_values(kind: Kind, client: str, version: int, values: int) -> np.ndarray:
    """Return a client's delta for a version, (values,) fp32; of buffers, their values."""
    made = numbers(values, 100 * version + ord(client[0]))
    if client == "odd":
        made[5] = np.nan
    offset = 0
    for name, shape in kind.weights:
        part = made[offset : offset + int(np.prod(shape))].reshape(shape)
        if name.endswith(("lora_A", "lora_B")) and client in kind.ranks:
            part[kind.ranks[client] :] = 0.0  # rows that this client does not train
        if name.endswith("patch"):
            part[:] = 0.0
        offset += part.size
    return made
