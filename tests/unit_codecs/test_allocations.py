"""Memory of the native codec: a call per chunk allocates none, and a thread's scratch stays below
WIRE.md's bound.
"""

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
WIRE = Path(__file__).parent.parent.parent / "docs" / "WIRE.md"
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


SCRATCH = """
import ctypes, json, sys, threading
import numpy as np
from fsl_codecs import CodecSpec, bound
from fsl_codecs.dispatch import choice

codec = choice().chosen
counted = ctypes.CDLL(sys.argv[1]).counted_bytes
counted.restype = ctypes.c_ulong
generator = np.random.default_rng(0)
bell = generator.standard_normal(1 << 20, dtype=np.float32)
# Most are powers of two, so that lower planes have codes, too.
exact = generator.random(1 << 20) < 0.9
exponents = generator.integers(-7, 0, 1 << 20)
powers = np.ldexp(np.where(exact, 1, 1 + bell), exponents).astype(np.float32)
out, residual = np.empty_like(bell), np.zeros_like(bell)
found = {}


def in_a_new_thread(name, call):
    def run():
        before = counted()
        call()
        found[name] = counted() - before

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


for name in ("fp32", "bf16", "e4m3", "e5m2", "uniform"):
    spec = CodecSpec(format=name, block_values=16, chunk_values=1 << 20)
    room = bytearray(bound(1 << 20, spec))
    for values, what in ((powers, "powers"), (bell, "encode")):
        in_a_new_thread(f"{name} {what}", lambda: codec.encode_into(values, room, spec))
    in_a_new_thread(
        f"{name} residual", lambda: codec.encode_into(values, room, spec, residual=residual)
    )
    size = codec.encode_into(values, room, spec)
    frame = bytes(memoryview(room)[:size])
    in_a_new_thread(f"{name} decode", lambda: codec.decode_into(frame, out))
    in_a_new_thread(f"{name} accumulate", lambda: codec.decode_accumulate(frame, out, 0.5))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def counted_run(tmp_path_factory):
    """Return a function that runs a program with the counter preloaded and returns its output."""
    if choice().chosen.name == "numpy":
        pytest.skip("no native codec")
    if COMPILER is None or platform.libc_ver()[0] != "glibc":
        pytest.skip("needs a C compiler and glibc")
    library = tmp_path_factory.mktemp("counted") / "counted.so"
    build = [COMPILER, "-O1", "-shared", "-fPIC", "-w", "-fno-builtin", "-o", library, COUNTER]
    subprocess.run(build, check=True)

    def run(program):
        ran = subprocess.run(
            [sys.executable, "-c", program, library], env=os.environ | {"LD_PRELOAD": str(library)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return json.loads(ran.stdout)

    return run


def test_a_call_for_a_chunk_allocates_nothing(counted_run):
    """A frequent call that allocates is slow on the chunks for which the heap grows."""
    found = counted_run(HOT_CALLS)
    assert found.pop("python") >= 50
    # Of 50 calls; Python itself may take an arena of small objects meanwhile.
    assert all(count < 5 for count in found.values()), found


def test_scratch_stays_below_what_is_stated(counted_run):
    """WIRE.md, "What it takes". Chunks here are as large as they may be."""
    found = counted_run(SCRATCH)
    scratch, values = 400_000, 2**20
    assert "has 0.4 MB of scratch" in WIRE.read_text()
    for name, encoding, codes in (
        ("fp32", 5.5, 4),
        ("bf16", 3.5, 2),
        ("e4m3", 3.5, 1),
        ("e5m2", 3.5, 1),
        ("uniform", 7.5, 1),
    ):
        kept, added = encoding * values, (codes + 0.25) * values
        assert scratch / 2 < found[f"{name} decode"] < scratch, found
        assert kept / 2 < found[f"{name} encode"] < scratch + kept, found
        assert kept / 2 < found[f"{name} powers"] < scratch + kept, found
        assert found[f"{name} residual"] < scratch + kept + 4.1 * values, found
        assert added / 2 < found[f"{name} accumulate"] < scratch + added, found
