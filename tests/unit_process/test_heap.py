"""Blocks of memory that stay in the heap when they are freed."""

import ctypes
import subprocess
import sys

import pytest

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
