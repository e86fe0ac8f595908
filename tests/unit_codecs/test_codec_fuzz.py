"""Fuzz targets of the native decoder, under the sanitizers: seconds here, minutes by hand (codecs/native/tests/fuzz/run.sh)."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fsl_codecs import available

SCRIPT = Path(__file__).parents[2] / "codecs" / "native" / "tests" / "fuzz" / "run.sh"
COMPILER = os.environ.get("CXX", "g++")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}: nothing native here")
def test_mutated_frames_harm_no_decoder(tmp_path):
    """Each target ends by itself only if no read or write was out of bounds and all kernel paths agreed on each frame.

    Before them, every kernel of every path on buffers that end at a page that faults.
    """
    environment = {**os.environ, "FSL_FUZZ_PLAIN": "1", "CXX": COMPILER}
    done = subprocess.run(
        [str(SCRIPT), "2", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # A path may have several tables of kernels, for instance for processors with VPCLMULQDQ: "avx2 with a wide CRC: 20 rounds".
    rounds = re.findall(r"^(\w+)( [\w ]+)?: 20 rounds$", done.stdout, re.MULTILINE)
    assert {path for path, _ in rounds} == set(available()) - {"numpy"}, done.stdout
    inputs = [int(count) for count in re.findall(r"^(\d+) inputs$", done.stdout, re.MULTILINE)]
    assert len(inputs) == 4
    assert min(inputs) >= 100
