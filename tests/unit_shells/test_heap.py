"""Large blocks of memory that go back to the machine when they are freed."""

import ctypes

import pytest

from fsl_async.heap import LARGE_BYTES, keep_large_blocks_apart

C = ctypes.CDLL(None)


class Books(ctypes.Structure):
    """`struct mallinfo2` (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


@pytest.mark.skipif(not hasattr(C, "mallinfo2"), reason="needs glibc 2.33")
def test_a_large_block_is_a_mapping_of_its_own_also_after_a_larger_one_was_freed():
    """That raises the limit otherwise, and a split server grows by what its clients keep in place."""
    C.malloc.restype, C.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    C.free.restype, C.free.argtypes = None, [ctypes.c_void_p]
    C.mallinfo2.restype = Books
    assert keep_large_blocks_apart()
    C.free(C.malloc(16 << 20))
    before = C.mallinfo2().hblks
    block = C.malloc(LARGE_BYTES)
    after = C.mallinfo2().hblks
    C.free(block)
    assert after == before + 1
