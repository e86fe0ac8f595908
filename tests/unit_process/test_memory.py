"""The measured growth is that of the model and nothing else."""

import ctypes
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


BOOKS = """
import ctypes
from fsl_async.process.memory import keep_freed_blocks

class Books(ctypes.Structure):  # struct mallinfo2, mallinfo(3)
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
C.free.restype, C.free.argtypes = None, [ctypes.c_void_p]
C.mallinfo2.restype = Books
"""
CHUNKS = """
assert keep_freed_blocks()
for _ in range(3):
    blocks = [C.malloc(1 << 20) for _ in range(16)]
    top = C.mallinfo2()
    for block in blocks:
        C.free(block)
print(C.mallinfo2().arena >= 16 << 20, C.mallinfo2().arena == top.arena, top.hblks - before)
"""


def run_script(script):
    """Run a script in its own process, whose heap has no holes yet."""
    words = [sys.executable, "-c", BOOKS + "before = C.mallinfo2().hblks" + script]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


needs_books = pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33"
)


@needs_books
def test_blocks_of_chunks_stay_in_the_heap_when_they_are_freed():
    """Otherwise the system clears their pages again for each chunk."""
    assert run_script(CHUNKS) == "True True 0\n"
