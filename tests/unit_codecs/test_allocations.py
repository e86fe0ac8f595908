"""Memory of the native codec: a call per chunk allocates none."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fsl_codecs.dispatch import choice

COMPILER = shutil.which("gcc") or shutil.which("cc")
COUNTER = Path(__file__).with_name("counted_malloc.c")
HOT_CALLS = """
import ctypes, json, sys
import numpy as np
from fsl_codecs import CodecSpec, bound
from fsl_codecs.dispatch import choice

codec = choice().chosen
counted = ctypes.CDLL(sys.argv[1]).counted_calls
counted.restype = ctypes.c_ulong
values = np.random.default_rng(0).standard_normal(300_000, dtype=np.float32)
values[7] = 1e30  # of uniform, an escape
out, accumulator = np.empty_like(values), np.zeros_like(values)
reference, residual = 0.5 * values, np.zeros_like(values)
found = {}
for name in ("fp32", "bf16", "e4m3", "e5m2", "uniform"):
    spec = CodecSpec(format=name)
    room = bytearray(bound(values.size, spec))
    size = codec.encode_into(values, room, spec)
    frame = bytes(memoryview(room)[:size])

    def encode(**feedback):
        return lambda: codec.encode_into(values, room, spec, **feedback)

    calls = {
        "encode": encode(),
        "encode reference": encode(reference=reference),
        "encode residual": encode(residual=residual),
        "encode both": encode(reference=reference, residual=residual),
        "decode": lambda: codec.decode_into(frame, out),
        "accumulate": lambda: codec.decode_accumulate(frame, accumulator, 0.5),
    }
    for what, call in calls.items():
        for _ in range(3):
            call()
        before = counted()
        for _ in range(50):
            call()
        found[f"{name} {what}"] = counted() - before
# The count must be able to move.
before = counted()
kept = [bytearray(100_000) for _ in range(50)]
found["python"] = counted() - before
print(json.dumps(found))
"""


def test_a_call_for_a_chunk_allocates_nothing(tmp_path):
    """A frequent call that allocates is slow on the chunks for which the heap grows."""
    if choice().chosen.name == "numpy":
        pytest.skip("no native codec")
    if COMPILER is None or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs a C compiler and glibc")
    library = tmp_path / "counted.so"
    build = [COMPILER, "-O1", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", library, COUNTER]
    subprocess.run(build, check=True)
    ran = subprocess.run(
        [sys.executable, "-c", HOT_CALLS, library], env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(ran.stdout)
    assert found.pop("python") >= 50
    # Of 50 calls; Python itself may take an arena of small objects meanwhile.
    assert all(count < 5 for count in found.values()), found
