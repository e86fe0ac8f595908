"""The native decoder's kernels beyond their buffers, and its fuzz targets under the sanitizers."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fsl_codecs import available

NATIVE = Path(__file__).parents[2] / "codecs" / "native"
COMPILER = os.environ.get("CXX", "g++")
PATHS = set(available()) - {"numpy"}

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER) is None, reason=f"no {COMPILER}: nothing native here"
)


def paths_of(output, rounds):
    """Return the paths whose kernels passed so many rounds.

    A path may have several tables of kernels: "avx2 with a wide CRC: 3 rounds".
    """
    return set(re.findall(rf"^(\w+)(?: [\w ]+)?: {rounds} rounds$", output, re.MULTILINE))


@pytest.mark.sweep
@needs_compiler
def test_kernels_stay_within_their_buffers(tmp_path):
    """Each kernel of each path gives the plain one's result, on buffers that end at a page.

    The page faults, so no sanitizer is needed, which would take a minute to build.
    """
    tests, sources = NATIVE / "tests", NATIVE / "src"
    files = [tests / "kernels_test.cpp", *sorted((sources / "kernels").rglob("*.cpp"))]
    objects = [tmp_path / f"{number}.o" for number in range(len(files))]
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-ffp-contract=off", f"-I{sources}", "-c"]
    builds = [
        subprocess.Popen([*command, file, "-o", made])
        for file, made in zip(files, objects, strict=True)
    ]
    assert [build.wait(300) for build in builds] == [0] * len(files)
    program = tmp_path / "kernels_test"
    subprocess.run([COMPILER, *objects, "-o", program], check=True)
    done = subprocess.run([program, "2"], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert paths_of(done.stdout, 2) == PATHS


@pytest.mark.sweep
@pytest.mark.slow
@needs_compiler
def test_mutated_frames_harm_no_decoder(tmp_path):
    """No target reads or writes out of bounds, and all kernel paths agree on each frame.

    The kernels run first, under the sanitizers. Coverage guides the mutations where the machine has
    clang++ with libFuzzer; elsewhere they are random. Minutes by hand:
    codecs/native/tests/fuzz/run.sh.
    """
    done = subprocess.run(
        [str(NATIVE / "tests" / "fuzz" / "run.sh"), "4", str(tmp_path)],
        env={**os.environ, "CXX": COMPILER},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert paths_of(done.stdout, 20) == PATHS, done.stdout
    counted = r"^(?:(\d+) inputs|stat::number_of_executed_units: (\d+))$"
    inputs = [int(blind or led) for blind, led in re.findall(counted, done.stdout, re.MULTILINE)]
    assert len(inputs) == 4
    assert min(inputs) >= 100
