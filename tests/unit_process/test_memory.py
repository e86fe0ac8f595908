"""The measured growth is that of the model and nothing else."""

import subprocess
import sys

import pytest

from fsl_async.process.memory import mapped_bytes

SCRIPT = """
import mmap, sys
from fsl_async.process.memory import MemoryMark
held = b"x" * (8 << 20)
MemoryMark.take(held=len(held))
with open(sys.argv[1], "rb") as file:
    view = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    read = sum(view[at] for at in range(0, len(view), 4096))
more = b"x" * (16 << 20)
print(MemoryMark.grown())
"""


@pytest.mark.skipif(not mapped_bytes(), reason="this system does not say what is mapped")
def test_pages_of_files_are_no_growth_and_a_model_that_is_held_is(tmp_path):
    """Mapped data must not count; weights that exist before the mark must."""
    path = tmp_path / "data"
    path.write_bytes(b"x" * (32 << 20))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)], capture_output=True, text=True, check=True
    )
    assert 22 << 20 < int(done.stdout) < 27 << 20, done.stdout
