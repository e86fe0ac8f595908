"""The manifest: its layout, its messages, and what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async.store.errors import ManifestError
from fsl_async.store.model import manifest as module
from fsl_async.store.model.manifest import CHUNK_VALUES, Manifest, TensorSpec

SHAPES = [("layer.weight", (4, 3)), ("layer.scale", ()), ("empty", (0, 5)), ("layer.bias", (4,))]


def test_tensors_lie_one_after_the_other():
    """All nodes agree on offsets; a scalar has one value and an empty tensor none."""
    manifest = Manifest.from_shapes(SHAPES)
    assert [tensor.offset for tensor in manifest.tensors] == [0, 12, 13, 13]
    assert manifest.values == 17
    assert manifest.tensor_at(12) == "layer.scale"
    assert manifest.tensor_at(13) == "layer.bias"
    with pytest.raises(IndexError):
        manifest.tensor_at(17)


def test_chunks_cover_every_value_once():
    """A gap or an overlap between chunks would be a wrong weight."""
    manifest = Manifest.from_shapes([("w", (CHUNK_VALUES, 2)), ("b", (5,))])
    assert manifest.chunks == 3
    ranges = [manifest.chunk_range(index) for index in range(3)]
    assert ranges[0] == (0, CHUNK_VALUES)
    assert [stop for _, stop in ranges[:-1]] == [start for start, _ in ranges[1:]]
    assert ranges[-1][1] == manifest.values
    assert manifest.chunk_values(2) == 5
    for index in (-1, 3):
        with pytest.raises(IndexError):
            manifest.chunk_range(index)


def test_the_wire_form_is_read_back_equal():
    """A client compares its own manifest with the received one."""
    manifest = Manifest.from_shapes(SHAPES)
    again = Manifest.from_wire(manifest.to_wire())
    assert again == manifest
    assert again.fingerprint == manifest.fingerprint
    assert again.difference(manifest) is None


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ([("a", (2,))], "tensor 'b' 3x2 exists only here"),
        ([("a", (2,)), ("b", (3, 2)), ("c", ())], "tensor 'c' scalar exists only there"),
        ([("a", (2,)), ("b", (2, 3))], "tensor 'b' is 3x2 here and 2x3 there"),
        ([("a", (2,)), ("B", (3, 2))], "tensor 1 is 'b' 3x2 here and 'B' 3x2 there"),
    ],
)
def test_the_first_difference_is_named(other, sentence):
    """A refused client needs the name of the tensor that differs."""
    mine, theirs = Manifest.from_shapes([("a", (2,)), ("b", (3, 2))]), Manifest.from_shapes(other)
    assert mine.difference(theirs) == sentence
    assert mine.fingerprint != theirs.fingerprint


def test_fingerprints_cannot_be_shifted():
    """Characters moved between names and shapes change the fingerprint."""
    prints = {
        Manifest.from_shapes(shapes).fingerprint
        for shapes in (
            [("a", (1, 2)), ("b", (2,))],
            [("a", (2, 1)), ("b", (2,))],
            [("ab", (1, 2)), ("b", (2,))],
            [("a", (2,)), ("b", (1, 2))],
            [("b", (2,)), ("a", (1, 2))],
        )
    }
    assert len(prints) == 5
    assert {len(text) for text in prints} == {32}


@pytest.mark.parametrize(
    "wire",
    [
        None,
        {},
        [],
        [[]],
        [["w", [1]]],
        [["w", [1], 0, 0]],
        [["w", 1, 0]],
        [["w", [1], 0.0]],
        [["w", [1.0], 0]],
        [["w", [True], 0]],
        [["w", [1], False]],
        [["w", [-1], 0]],
        [["w", [-1, -1], 0]],
        [[b"w", [1], 0]],
        [["", [1], 0]],
        [["x" * 513, [1], 0]],
        [["two\nlines", [1], 0]],
        [["\ud800", [1], 0]],
        [["__metadata__", [1], 0]],
        [["w", [1], 1]],
        [["w", [2], 0], ["v", [1], 1]],
        [["w", [1], 0], ["w", [1], 1]],
        [["w", [0], 0]],
        [["w", [1] * 17, 0]],
        [["w", [2**41], 0]],
        [["w", [2**40, 2**40], 0]],
        [["w", [2**40], 0], ["v", [1], 2**40]],
        [["w", [10**400, 0], 0]],
    ],
)
def test_hostile_manifests_are_refused(wire):
    """A manifest is the first thing that an unauthenticated peer sends."""
    with pytest.raises(ManifestError):
        Manifest.from_wire(wire)


def test_too_many_tensors_are_refused_unread(monkeypatch):
    """The limit is checked before the work."""
    monkeypatch.setattr(module, "MAX_TENSORS", 2)
    with pytest.raises(ManifestError, match="2 tensors, not 3"):
        Manifest.from_wire([object(), object(), object()])
    with pytest.raises(ManifestError, match="2 tensors, not 3"):
        Manifest(tuple(TensorSpec(name, (1,), at) for at, name in enumerate("abc")))


_junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(_junk | st.tuples(st.text(), st.lists(st.integers()), st.integers()).map(list)))
def test_junk_never_raises_anything_else(wire):
    """Any input costs the peer its session and this node nothing."""
    try:
        manifest = Manifest.from_wire(wire)
    except ManifestError as error:
        message = str(error)
    else:
        message = ""
        assert manifest.to_wire() == wire
    assert "\n" not in message
    assert len(message) < 1500
