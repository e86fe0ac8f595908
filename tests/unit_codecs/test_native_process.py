"""The native codec in a process: buffers, threads, forks, floating-point settings, and the variable
that chooses a path.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from native_paths import (
    BLOCK,
    FORMATS,
    REFERENCE,
    decoded_by,
    encoded_by,
    needs_native,
    on_every_path,
    values_of,
)

from fsl_codecs import CodecSpec, available
from fsl_codecs.dispatch import implementation_named

pytestmark = needs_native


@on_every_path
def test_flushed_subnormals_change_nothing(path):
    """A thread that trains may flush subnormals to zero; frames, values and the setting stay the
    same.
    """
    torch = pytest.importorskip("torch")
    codec = implementation_named(path)
    values = values_of("subnormal", 3000)
    frames = [encoded_by(REFERENCE, values, CodecSpec(name)) for name in FORMATS]
    expected = [decoded_by(REFERENCE, frame, 3000).tobytes() for frame in frames]
    if not torch.set_flush_denormal(True):
        pytest.skip("this machine cannot flush subnormals")
    try:
        for name, frame, decoded in zip(FORMATS, frames, expected, strict=True):
            assert encoded_by(codec, values, CodecSpec(name)) == frame
            assert decoded_by(codec, frame, 3000).tobytes() == decoded
        assert torch.tensor([1e-39]).mul(1).item() == 0
    finally:
        torch.set_flush_denormal(False)


@on_every_path
def test_calls_at_the_same_time(path):
    """Several Python threads in the codec at once, with their own pools."""
    codec = implementation_named(path)
    inputs = [values_of("bell", 3 * BLOCK + 100 * i, seed=i) for i in range(6)]
    spec = CodecSpec("e4m3", chunk_values=BLOCK)
    expected = [encoded_by(REFERENCE, values, spec) for values in inputs]

    def work(number):
        values = inputs[number % len(inputs)]
        frame = encoded_by(codec, values, spec, threads=1 + number % 4)
        out = np.empty_like(values)
        codec.decode_into(frame, out, threads=1 + number % 3)
        return frame, out.tobytes()

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(work, range(48)))
    for number, (frame, decoded) in enumerate(results):
        assert frame == expected[number % len(inputs)]
        if number < len(inputs):
            assert decoded == decoded_by(REFERENCE, frame, inputs[number].size).tobytes()


def python(code, *arguments, **variables):
    """Run a fresh interpreter; returns exit code, output and errors."""
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stdout.strip(), done.stderr.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fork():
    """The pool's threads do not survive a fork; the child gets its own."""
    code = """
import os, warnings, numpy as np
from fsl_codecs import CodecSpec, bound
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of threads at fork
from fsl_codecs.dispatch import available, implementation_named
codec, spec = implementation_named(available()[0]), CodecSpec("e4m3", chunk_values=16384)
values = np.ones(1 << 18, np.float32); values[::3] = 2
out = np.zeros(bound(values.size, spec), np.uint8)
def frame():
    return out[:codec.encode_into(values, out, spec, threads=3)].tobytes()
before = frame()
child = os.fork()
if child == 0:
    os._exit(0 if frame() == before and frame() == before else 1)
assert frame() == before
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert python(code, FSL_CODECS_PATH="auto") == (0, "0", "")


SHOW = "import fsl_codecs; print(fsl_codecs.implementation(), *fsl_codecs.available())"


def test_the_variable_chooses():
    """FSL_CODECS_PATH names the implementation (below); auto and empty mean the best."""
    for name in ("auto", ""):
        assert python(SHOW, FSL_CODECS_PATH=name)[1].split() == [available()[0], *available()]


VECTORS = """
import sys
sys.path.insert(0, sys.argv[1])
import fsl_codecs
import test_codec_vectors as golden
for vector in golden.VECTORS:
    golden.test_golden_frames_are_written_and_read_unchanged(vector)
print(fsl_codecs.implementation(), len(golden.VECTORS))
"""


@pytest.mark.parametrize("name", available())
def test_golden_vectors_on_the_path_that_the_variable_chooses(name):
    """The package's own functions on that path, as a user who sets the variable gets them."""
    code, output, errors = python(VECTORS, str(Path(__file__).parent), FSL_CODECS_PATH=name)
    assert code == 0, errors
    chosen, vectors = output.split()
    assert chosen == name
    assert int(vectors) > 100


def test_an_unknown_name_is_one_clear_line():
    """A typing error in the variable must not select something slow."""
    code, _, errors = python(SHOW, FSL_CODECS_PATH="avx1024")
    assert code == 1
    assert errors.splitlines()[-1].endswith(
        "CodecUsageError: FSL_CODECS_PATH=avx1024: no codec implementation 'avx1024': "
        "use one of avx512, avx2, scalar, numpy"
    )
