"""Calls of the native codec release Python's lock: a server codes while its event loop sends
heartbeats.
"""

import sys
import threading

import numpy as np
import pytest
from native_paths import encoded_by, needs_native, on_every_path, values_of

from fsl_codecs import CodecSpec, bound
from fsl_codecs.dispatch import implementation_named

pytestmark = needs_native

COUNT = 1 << 20
TRIES = 500
"""Calls of a millisecond or more: enough for the system to run the other thread on a busy
machine.
"""


def calls_of(codec):
    """Return every call that works for long, by name."""
    spec = CodecSpec("e4m3")
    values = values_of("bell", COUNT)
    frame = encoded_by(codec, values, spec)
    room, out = np.empty(bound(COUNT, spec), np.uint8), np.empty_like(values)
    return {
        "encode_into": lambda: codec.encode_into(values, room, spec),
        "decode_into": lambda: codec.decode_into(frame, out),
        "decode_accumulate": lambda: codec.decode_accumulate(frame, out, 0.5),
        "info": lambda: codec.info(frame),
    }


def another_thread_runs_during(call):
    """Return whether a waiting thread runs Python while `call` works, in one of TRIES calls.

    Nothing else lets it run: Python takes the lock from a running thread only after the switch
    interval, which is hours here. So the thread also waits at the gate when `start` returns.
    """
    gate, ran = threading.Lock(), []
    thread = threading.Thread(target=lambda: ran.append(gate.acquire()))
    before = sys.getswitchinterval()
    sys.setswitchinterval(10_000)
    try:
        with gate:
            thread.start()
        for _ in range(TRIES):
            call()
            if ran:
                break
        return bool(ran)
    finally:
        sys.setswitchinterval(before)
        thread.join()


@on_every_path
@pytest.mark.parametrize("name", ["encode_into", "decode_into", "decode_accumulate", "info"])
def test_other_threads_run_during_a_call(path, name):
    """Otherwise a node misses its heartbeats whenever it codes."""
    assert another_thread_runs_during(calls_of(implementation_named(path))[name])
