"""Large blocks of memory that go back to the machine when they are freed."""

import ctypes
import subprocess
import sys

import pytest

SCRIPT = """
import ctypes
from fsl_async.heap import LARGE_BYTES, keep_large_blocks_apart

class Books(ctypes.Structure):  # struct mallinfo2, mallinfo(3)
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]

C = ctypes.CDLL(None)
C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
C.free.restype, C.free.argtypes = None, [ctypes.c_void_p]
C.mallinfo2.restype = Books
assert keep_large_blocks_apart()
C.free(C.malloc(16 << 20))
before = C.mallinfo2().hblks
blocks = [C.malloc(8 * LARGE_BYTES) for _ in range(8)]
print(C.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_large_blocks_are_mappings_of_their_own_also_after_a_larger_one_was_freed():
    """That raises the limit otherwise, and a split server grows by what its clients keep in place. In a process whose heap has no holes to use first."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "8\n"
