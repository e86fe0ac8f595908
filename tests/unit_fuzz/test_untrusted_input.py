"""A peer's bytes may cause an error that ends its session; no other error, and bounded time and
memory.
"""

import contextlib
import time
import tracemalloc

import fuzz_parsers as fuzz
import msgpack
import parser_targets as targets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.roles.messages import MessageError
from fsl_async.roles.split import messages as split
from fsl_async.roles.sync import messages as msg
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest
from fsl_transport import PeerError
from fsl_transport.session import frames


@pytest.mark.parametrize("name", targets.TARGETS)
def test_mutated_input_gives_only_the_errors_it_may(name, tmp_path, monkeypatch):
    """A part of what `fuzz_parsers.py` does for minutes keeps targets and parsers right."""
    monkeypatch.chdir(tmp_path)
    assert fuzz.plain(name, targets.TARGETS[name], 0.2, seed=4) >= 20


# --- memory and time ---


def nested(depth, inside):
    for _ in range(depth):
        inside = [inside]
    return inside


def in_message(body):
    return msgpack.packb([frames.DATA, targets.SESSION, 1, 0, frames.MESSAGE, body])


def bombs(size):
    """Return inputs of about `size` bytes that cost as much time and memory as they can."""
    empties = [[[]] * min(size // 4, 100_000)] * 4
    tensor = ["t" * 200, [1], 0]
    names = [[f"t{number}", [1], number, False] for number in range(size // 12)]
    return {
        "empty lists": ("message", in_message({"m": empties})),
        "empty maps": ("message", in_message({"m": [[{}] * min(size // 4, 100_000)] * 4})),
        "long text": ("message", in_message({"m": "stop/1", "reason": "x" * size})),
        "long key": ("message", in_message({"m": "accepted/1", "key": "1/" * (size // 2)})),
        "many keys": ("message", in_message({str(number): 1 for number in range(size // 8)})),
        "a great manifest": (
            "message",
            in_message({"m": "attach/3", "fingerprint": "", "manifest": names}),
        ),
        "one name": (
            "message",
            in_message({"m": "attach/3", "fingerprint": "", "manifest": [tensor] * (size // 210)}),
        ),
        "deep": ("message", in_message({"m": nested(min(size, 400), 1)})),
        "long address": ("texts", b"a." * (size // 2)),
        "dashes": ("texts", b"tcp://" + b"-" * size),
        "slashes": ("texts", b"a/" * (size // 2)),
        "digits": ("texts", b"a/" + b"9" * size),
        "frame of zeros": ("spool", bytes(size)),
        "long frame": ("spool", targets.coded(targets.MODEL.values)[0] * (size // 300)),
        "labels": ("payload", bytes(size)),
        "garbage": ("server", bytes(size)),
    }


@pytest.mark.parametrize("name", bombs(1000))
def test_memory_is_bounded_by_what_was_sent(name):
    """A message costs at most `amplification` bytes of memory for each of its bytes."""
    kind, data = bombs(60_000)[name]
    target = targets.TARGETS[kind]
    fuzz.probe(target, data)  # allocates scratch and caches once
    tracemalloc.start()
    try:
        error = fuzz.probe(target, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert error is None
    assert peak <= target.constant + target.amplification * len(data)


def peak_of(data):
    tracemalloc.start()
    try:
        with pytest.raises(PeerError):
            frames.parse([data], 1 << 22, 0)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_arrays_that_claim_more_than_they_hold():
    """An array is allocated before it is read: at most one entry per byte of the message, 10,000 in
    each of at most 1,024 levels.
    """
    claim = b"\xdd\x00\x01\xff\xff"
    assert peak_of(claim * 20) < 20_000
    assert peak_of(claim + bytes(60)) < 20_000
    assert peak_of(b"\xdc\x00\x64" * 100 + bytes(100)) < 200_000
    assert peak_of(claim * 400_000) < 96 << 20


@pytest.mark.parametrize("name", bombs(1000))
def test_time_grows_with_what_was_sent(name):
    """Sixteen times the bytes cost at most 80 times the time; quadratic work would cost 256
    times.
    """

    def cost_s(size):
        kind, data = bombs(size)[name]
        times = []
        for _ in range(3):
            begun = time.process_time()
            fuzz.probe(targets.TARGETS[kind], data)
            times.append(time.process_time() - begun)
        return min(times)

    assert cost_s(64_000) <= 80 * cost_s(4_000) + 0.02


@given(
    st.lists(
        st.tuples(
            st.text(max_size=3),
            st.lists(st.integers(-2, 1 << 62), max_size=18),
            st.integers(),
            st.booleans(),
        )
    )
)
def test_a_manifest_is_consistent_or_refused(tensors):
    """A manifest determines allocations: its sizes are consistent and at most 2^40 values, or it is
    refused.
    """
    try:
        found = Manifest.from_wire([list(tensor) for tensor in tensors])
    except ManifestError:
        return
    assert found.values == sum(tensor.values for tensor in found.tensors) <= 1 << 40


@given(
    st.sampled_from([msg.TABLE, split.TABLE]),
    st.recursive(
        st.none() | st.integers() | st.text(max_size=5) | st.floats(),
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4)
        ),
    ),
)
def test_fields_of_other_types(table, junk):
    """Each field of each message, replaced by anything that msgpack carries."""
    for name, kind in table.types.items():
        for field in kind.__attrs_attrs__:
            body = {
                "m": name,
                **dict.fromkeys((one.name for one in kind.__attrs_attrs__), 0),
                field.name: junk,
            }
            try:
                table.from_wire(body)
            except MessageError:
                continue


@given(st.lists(st.binary(max_size=80), max_size=3))
def test_frames_of_any_bytes(parts):
    """Any frames of any bytes give a message or a PeerError."""
    with contextlib.suppress(PeerError):
        frames.parse(parts, 1 << 10, 1 << 10)
