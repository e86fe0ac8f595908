"""Runs of a store that merges adapters by products, and deltas for them."""

import threading

import numpy as np
from deltas import merged_of

from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import Delta, DeltaKey
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import RULES
from fsl_codecs import CodecSpec, encode

RANK, SCALE = 4, 2.0
FP32 = CodecSpec(format="fp32")
LOSSY = CodecSpec("uniform", block_values=16, chunk_values=64)
SHAPES = {"m.q": (11, 9), "m.v": (7, 13)}  # (in, out)
PRODUCT_RULES = sorted(name for name, rule in RULES.items() if rule.merges_products)
TOKENS = {"a": 10, "b": 30, "c": 20, "d": 40}


def model(rule):
    shapes = []
    for name, (inputs, outputs) in SHAPES.items():
        shapes += [(f"{name}.lora_A", (RANK, inputs)), (f"{name}.lora_B", (RANK, outputs))]
        if RULES[rule].has_patch:
            shapes.append((f"{name}.patch", (outputs, inputs)))
    return Manifest.from_shapes([*shapes, ("head.weight", (3, 17))])


def parts(manifest, vector):
    """Tensors by name, as views."""
    return {
        one.name: vector[one.offset : one.offset + one.values].reshape(one.shape)
        for one in manifest.tensors
    }


class Tuning:
    """A run of adapters: sites that move factors, and an exact account of the products."""

    def __init__(self, run, rule):
        self.run, self.rule, self.manifest = run, RULES[rule](), run.manifest

    @property
    def store(self):
        """The open store."""
        return self.run.store

    @property
    def vectors(self):
        """Those in memory."""
        return self.store._open.newest.vectors

    def start(self, files=None):
        """Version 0: A of noise, B and patches of zeros."""
        self.run.open(files)
        values = np.zeros(self.manifest.values, np.float32)
        for name, tensor in parts(self.manifest, values).items():
            if name.endswith("lora_A"):
                tensor[:] = np.random.default_rng(1).standard_normal(tensor.shape) * 0.5
        self.store.begin_initial(self.manifest)
        for index in range(self.manifest.chunks):
            start, stop = self.manifest.chunk_range(index)
            self.store.write_initial(index, encode(values[start:stop], FP32))
        self.store.finish_initial()

    def products(self, vector, rank=RANK):
        """What each module adds to its weight, in double precision."""
        tensors = parts(self.manifest, vector.astype(np.float64))
        rows = RANK if self.rule.keeps_tail else rank
        found = {}
        for name in SHAPES:
            a, b = tensors[f"{name}.lora_A"][:rows], tensors[f"{name}.lora_B"][:rows]
            found[name] = SCALE * b.T @ a + tensors.get(f"{name}.patch", 0.0)
        return found

    def delta(self, version, name, rank=RANK, size=0.02):
        """What a site learned: base minus its weights, zero in rows that it does not train."""
        seed = [version, ord(name[0])]
        moved = np.random.default_rng(seed).standard_normal(self.manifest.values) * size
        moved = moved.astype(np.float32)
        for tensor_name, tensor in parts(self.manifest, moved).items():
            if tensor_name.endswith(("lora_A", "lora_B")):
                tensor[rank:] = 0.0
            trains_a, trains_b = self.rule.trains_a(version - 1), self.rule.trains_b(version - 1)
            frozen = {"lora_A": not trains_a, "lora_B": not trains_b, "patch": True}
            if frozen.get(tensor_name.rpartition(".")[2], False):
                tensor[:] = 0.0
        return moved

    def send(self, key, values, rank=RANK, spec=FP32, **more):
        """Spool a delta. more: facts."""
        tokens = TOKENS[key.client]
        facts = {"rank": float(rank), **more}
        one = Delta(key, self.store.digest, tokens, 2, 1, {}, facts)
        assert self.store.spool_begin(one) is None
        for index in range(self.manifest.chunks):
            start, stop = self.manifest.chunk_range(index)
            self.store.spool_write(key, index, encode(values[start:stop], spec))
        return self.store.spool_finish(key)

    def merge(self, keys):
        """Commit, weighed by tokens."""
        tokens = {key: TOKENS[key.client] for key in keys}
        members = [merged_of(key, float(tokens[key]), tokens=tokens[key]) for key in keys]
        scale = 1.0 / sum(one.weight for one in members)
        return self.store.commit(self.store.version + 1, members, scale)

    def round(self, ranks, order=None, size=0.02):
        """Send and merge a delta of each client; ranks: by client."""
        version = self.store.version + 1
        keys = {name: DeltaKey(name, 1, version - 1, version) for name in ranks}
        for name, rank in ranks.items():
            self.send(keys[name], self.delta(version, name, rank, size), rank)
        return self.merge([keys[name] for name in order or ranks])


RANKS = {"a": 1, "b": 2, "c": 3, "d": RANK}
EQUAL = dict.fromkeys(RANKS, RANK)


def ranks_of(rule):
    return RANKS if RULES[rule].unequal_ranks else EQUAL


class Full(Files):
    """A disk that is full for one thread, by its name."""

    def __init__(self, thread="snapshot"):
        self.thread = thread
        self.is_full = True

    def write(self, descriptor, data, offset):
        """Fail, if it is that thread."""
        if self.is_full and threading.current_thread().name == self.thread:
            raise OSError(28, "No space left on device")
        super().write(descriptor, data, offset)

    def sync(self, descriptor):
        """Do nothing."""
