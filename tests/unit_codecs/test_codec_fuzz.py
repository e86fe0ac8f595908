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

    Before them, every kernel of every path on buffers that end at a page that faults. Coverage leads the mutations where the machine has
    clang++ with libFuzzer, which nothing here installs; elsewhere they are blind.
    """
    environment = {**os.environ, "CXX": COMPILER}
    done = subprocess.run(
        [str(SCRIPT), "4", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # A path may have several tables of kernels, for instance for processors with VPCLMULQDQ: "avx2 with a wide CRC: 20 rounds".
    rounds = re.findall(r"^(\w+)( [\w ]+)?: 20 rounds$", done.stdout, re.MULTILINE)
    assert {path for path, _ in rounds} == set(available()) - {"numpy"}, done.stdout
    counted = r"^(?:(\d+) inputs|stat::number_of_executed_units: (\d+))$"
    inputs = [int(blind or led) for blind, led in re.findall(counted, done.stdout, re.MULTILINE)]
    assert len(inputs) == 4
    assert min(inputs) >= 100
