"""Secure sums without a network: the opened sum is the sum of the sites' lattice numbers."""

import random

import numpy as np
import pytest
from client_sides import Sides, Weights

from fsl_async.roles.sync import messages as msg
from fsl_async.roles.sync.roster import Answers, Roster
from fsl_async.secure import lattice, shamir
from fsl_async.secure.masking import Masking
from fsl_async.secure.opening import Opening
from fsl_async.secure.site import Site
from fsl_codecs import CodecError, CodecSpec

RUN, ROUND, VALUES = "notes", 4, 1003


def entropy(seed):
    return random.Random(seed).randbytes


def sites_of(count, seed=0):
    made = {}
    for number in range(count):
        name = f"s{number}"
        random_bytes = entropy(f"{seed} {name}")
        made[name] = Site(name, RUN, random_bytes(32), lambda _: None, random_bytes)
    return made


def set_up(sites, step=0.01, bits=6, attempt=1):
    """Exchange keys and shares between all sites; return their set."""
    keys = {name: one.handle(msg.SecureCall(ROUND, attempt)) for name, one in sites.items()}
    members = [[name, key.site, key.key] for name, key in keys.items()]
    roster = Roster(ROUND, attempt, step, bits, members)
    sealed = {name: one.handle(msg.SecureSet(roster)) for name, one in sites.items()}
    for name, one in sites.items():
        given = [[other, dict(sealed[other].shares)[name]] for other in roster.neighbours(name)]
        assert one.handle(msg.SecureShares(ROUND, attempt, given)) is None
    return roster


def deltas_of(names, rng):
    return {name: (0.1 * rng.standard_normal(VALUES)).astype(np.float32) for name in names}


def opened(sites, roster, deltas, silent=()):
    """Mask, drop those without a delta, open the sum of the rest."""
    frames = {
        name: sites[name].take_masks(ROUND).frame(lattice.to_numbers(values, roster), 3)
        for name, values in deltas.items()
    }
    survivors = sorted(deltas)
    shares = {}
    for name in survivors:
        if name not in silent:
            answer = sites[name].handle(msg.Unmask(ROUND, roster.attempt, survivors))
            for other, share in answer.shares:
                shares.setdefault(other, {})[name] = share
    opening = Opening(Answers(roster, tuple(survivors), shares), RUN)
    return opening.mean(frames, 3, VALUES)


@pytest.mark.parametrize("bits", [4, 6, 8, 24])
@pytest.mark.parametrize(("count", "before", "silent"), [
    (3, 0, 0), (3, 0, 1), (4, 1, 0), (8, 0, 0), (8, 2, 1), (32, 0, 0), (32, 3, 2),
])  # fmt: skip
def test_the_opened_sum_is_that_of_the_lattice_numbers(count, before, silent, bits):
    rng = np.random.default_rng(count)
    sites = sites_of(count)
    roster = set_up(sites, bits=bits)
    names = list(sites)
    rng.shuffle(names)
    deltas = deltas_of(names[before:], rng)
    found = opened(sites, roster, deltas, silent=names[before:][:silent])
    numbers = sum(lattice.to_numbers(one, roster).astype(np.int64) for one in deltas.values())
    assert np.array_equal(found, lattice.to_values(numbers, roster.step / len(deltas)))
    assert np.abs(numbers).max() > 0


def test_words_have_as_many_bits_as_the_sum_of_all_sites_needs():
    def width(count, bits):
        members = [[f"s{n}", bytes(32), bytes([n] * 32)] for n in range(count)]
        return Roster(0, 1, 1.0, bits, members).width

    assert [width(8, bits) for bits in (4, 5, 6, 8)] == [7, 8, 9, 11]
    assert (width(3, 6), width(32, 6)) == (8, 11)


@pytest.mark.parametrize("width", [3, 8, 9, 11, 16, 17, 29, 32])
def test_frames_of_ring_words_are_packed_to_the_bit(width):
    words = np.random.default_rng(1).integers(0, 1 << width, 1001, dtype=np.uint64)
    words = words.astype(lattice.word_type(width))
    frame = lattice.pack(words, width)
    found, got = lattice.unpack(frame, 1001)
    assert np.array_equal(found, words)
    assert got == width
    assert len(frame) == lattice.frame_bytes(1001, width) <= 13 + 1001 * width / 8 + width
    for broken in (frame[:-1], frame[:9] + frame[10:] + b"x", b"FSM2" + frame[4:], b""):
        with pytest.raises(CodecError):
            lattice.unpack(broken, 1001)
    with pytest.raises(CodecError):
        lattice.unpack(frame, 1000)


def test_a_masked_frame_is_uniform_whatever_the_values():
    sites = sites_of(3)
    roster = set_up(sites)
    zeros = np.zeros(1 << 16, np.int32)
    words, width = lattice.unpack(sites["s0"].take_masks(ROUND).frame(zeros, 0), 1 << 16)
    counts = np.bincount(words & ((1 << width) - 1), minlength=1 << width)
    expected = len(words) / (1 << width)
    assert ((counts - expected) ** 2 / expected).sum() < 2 * (1 << width)
    assert roster.width == width


def test_chunks_have_different_masks():
    sites = sites_of(3)
    set_up(sites)
    taken, zeros = sites["s0"].take_masks(ROUND), np.zeros(64, np.int32)
    assert taken.frame(zeros, 0) != taken.frame(zeros, 1)


def test_any_majority_of_shares_gives_the_secret_and_fewer_do_not():
    secret = bytes(range(32))
    shares = dict(enumerate(shamir.split(secret, 3, 5, entropy(1)), 1))
    for chosen in ((1, 2, 3), (2, 4, 5), (1, 3, 5)):
        assert shamir.join({x: shares[x] for x in chosen}) == secret
    with pytest.raises(ValueError, match="not of one secret"):
        shamir.join({x: shares[x] for x in (1, 2)})


def test_what_a_frame_does_not_say_is_beyond_the_range_or_between_the_steps_of_the_lattice():
    sites = sites_of(3)
    set_up(sites)
    masking, values = Masking(), deltas_of(["a"], np.random.default_rng(1))["a"] * 10
    assert masking.bind(7, lambda: sites["s0"].take_masks(ROUND))
    _, lost = masking.encode(7, 0, values)
    largest = np.float32(0.01) * 31
    inside = np.abs(values) < largest
    assert np.abs(lost[inside]).max() < 0.0051
    np.testing.assert_allclose(lost[~inside], values[~inside] - np.sign(values[~inside]) * largest)


def test_a_delta_whose_masks_did_not_come_is_kept_whole():
    masking, values = Masking(), np.ones(5, np.float32)
    assert masking.bind(1, lambda: None) is None
    frame, lost = masking.encode(1, 0, values)
    assert frame == b""
    assert np.array_equal(lost, values)
    sites = sites_of(3)
    set_up(sites)
    assert masking.bind(1, lambda: sites["s0"].take_masks(ROUND)) == 0
    assert sites["s0"].take_masks(ROUND) is not None
    assert not masking.has_masks(1)


def test_masks_are_taken_once():
    sites = sites_of(3)
    set_up(sites)
    assert sites["s0"].take_masks(ROUND - 1) is None
    assert sites["s0"].take_masks(ROUND) is not None
    assert sites["s0"].take_masks(ROUND) is None


def sent_of(client, sequence, attempt):
    """Train by 0.1 and have the delta declined; return what it sent, under masks or not at all.

    attempt: whose masks it gets; 0: none came.
    """
    exchange, sites, sent = client.exchange, sites_of(3, attempt), np.zeros(VALUES, np.float32)
    if attempt:
        set_up(sites, attempt=attempt)
        assert exchange.masking.bind(sequence, lambda: sites["s0"].take_masks(ROUND))
    exchange.request_snapshot(sequence)
    client.step()
    code = exchange.masking.encode

    def encode(number, index, values):
        frame, lost = code(number, index, values)
        if frame:
            sent[:] = values - lost
        return frame, lost

    exchange.masking.encode = encode
    if attempt:
        exchange.finish_encoding(sequence)
    exchange.drop_delta(sequence)
    exchange.masking.encode = code
    return sent


def test_declined_work_is_in_no_second_sum_and_waits_only_if_it_never_left():
    """Else the difference of two sums, one of them of a round called void, is a site's update."""
    client, model = Sides(publishes=True), Weights(VALUES)
    client.exchange.configure(CodecSpec(), keeps_error=True, whole=False, is_secure=True)
    client.training.attach(model)
    sent = []
    for sequence, attempt in enumerate([1, 2, 0, 0, 3], 1):
        model.add(0.1)
        sent.append(sent_of(client, sequence, attempt).mean())
    np.testing.assert_allclose(sent, [-0.1, -0.1, 0, 0, -0.3], atol=0.01)
