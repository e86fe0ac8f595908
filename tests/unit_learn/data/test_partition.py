"""The division of samples: exact, disjoint, the same on every machine; bad input is refused."""

import decimal
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsl_async.errors import DataError
from fsl_async.learn.data.counter import permutation, random_words
from fsl_async.learn.data.dataset import Arrays
from fsl_async.learn.data.partition import Kind, PartitionSpec, _without_empty, epoch_order


def test_each_seed_and_name_has_a_stream_of_its_own():
    """Classes and clients must not be shuffled alike."""
    keys = [(7, "x"), (8, "x"), (7, "y")]
    assert len({word for key in keys for word in random_words(*key, 100).tolist()}) == 300
    assert random_words(7, "x", 100)[:9].tolist() == random_words(7, "x", 9).tolist()


def test_permutations_never_change():
    """After a change, upgraded sites would have other parts: the stream needs a new name."""
    assert permutation(1, "iid", 8).tolist() == GOLDEN_PERMUTATION
    assert epoch_order(1, "site-a", 2, 5).tolist() == GOLDEN_EPOCH
    assert sorted(permutation(3, "x", 1000).tolist()) == list(range(1000))
    for kind, edges in GOLDEN_EDGES.items():
        assert PartitionSpec(kind, 4, 5, 0.3).of_counts([50, 60]).edges == edges


GOLDEN_PERMUTATION = [5, 0, 6, 3, 2, 1, 4, 7]
GOLDEN_EPOCH = [0, 3, 4, 2, 1]
GOLDEN_EDGES = {
    "dirichlet": ((0, 0, 0, 39, 50), (0, 5, 47, 57, 60)),
    "dirichlet-equal": ((0, 0, 26, 26, 50), (0, 27, 29, 56, 60)),
    "sorted": ((0, 0, 14, 41, 50), (0, 27, 41, 41, 60)),
}


def test_the_callers_decimal_context_does_not_matter():
    """A caller that computes with 4 digits must get the same partition."""
    spec = PartitionSpec("dirichlet", 4, 5, 0.3)
    with decimal.localcontext(decimal.Context(prec=4, Emin=-9, Emax=9, rounding=decimal.ROUND_UP)):
        found = spec.of_counts([50, 60])
    assert found == spec.of_counts([50, 60])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(get_args(Kind)),
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
    st.integers(1, 12),
    st.sampled_from([1e-6, 0.01, 0.5, 1.0, 30.0, 1e6]),
    st.integers(0, 5),
)
def test_parts_are_disjoint_complete_and_never_empty(kind, counts, clients, alpha, seed):
    """Each sample belongs to exactly one client, and each client has samples."""
    labels = np.repeat(np.arange(len(counts)), counts)
    labels = labels[permutation(seed, "shuffle", len(labels))]
    spec, parts_each = PartitionSpec(kind, clients, seed, alpha), 1 + (kind == "sorted")
    if clients * parts_each > len(labels):
        with pytest.raises(DataError, match=rf"{clients} clients.*, but {len(labels)} samples"):
            spec.of_counts(counts)
        return
    made = spec.of_counts(counts)
    parts = [made.indices(client, labels) for client in range(clients)]
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert tuple(map(len, parts)) == sizes_of(made)
    assert min(sizes_of(made)) >= 1
    assert all((np.diff(part) > 0).all() for part in parts)
    if kind != "dirichlet":
        assert max(sizes_of(made)) - min(sizes_of(made)) <= parts_each
    if kind != "iid":
        for label, row in enumerate(made.edges):
            here = [int((labels[part] == label).sum()) for part in parts]
            assert here == np.diff(row).tolist()


@pytest.mark.parametrize("alpha", [0.1, 1.0, 5.0])
def test_shares_have_the_moments_of_a_dirichlet_distribution(alpha):
    """A wrong gamma sampler would make parts more or less even than alpha says."""
    clients, count = 4, 10**6
    made = PartitionSpec("dirichlet", clients, 11, alpha).of_counts([count] * 300)
    share = np.diff(np.array(made.edges)) / count
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    assert share.mean(0) == pytest.approx([mean] * clients, abs=4 * (variance / 300) ** 0.5)
    assert share.var() == pytest.approx(variance, rel=0.15)


def test_equal_sizes_keep_the_shares_of_a_dirichlet_distribution():
    """A client of alpha 0.1 must have few classes and as many samples as any other."""
    counts = [1000] * 10
    made = PartitionSpec("dirichlet-equal", 10, 3, 0.1).of_counts(counts)
    assert set(sizes_of(made)) == {1000}
    assert min(sizes_of(PartitionSpec("dirichlet", 10, 3, 0.1).of_counts(counts))) < 300
    held = np.diff(np.array(made.edges))  # [class][client]
    assert (held > 0.05 * 1000).sum(0).max() <= 6
    assert np.mean(held.max(0)) > 500
    even = np.diff(np.array(PartitionSpec("dirichlet-equal", 10, 3, 1e6).of_counts(counts).edges))
    assert even.min() >= 90  # roundings of the others are left for the last client
    assert even.max() <= 110
    # The first client's classes are its draw, of which no class has run out yet.
    many = PartitionSpec("dirichlet-equal", 160, 3, 5.0).of_counts([4000] * 10)
    drawn = np.diff(np.array(many.edges))[:, :80] / 250
    assert drawn.var() == pytest.approx(0.1 * 0.9 / 51, rel=0.15)


def test_sorted_pieces_give_clients_few_classes():
    """Two pieces of 20 hold two classes or fewer where 10 classes have two pieces each."""
    made = PartitionSpec("sorted", 10, 3).of_counts([100] * 10)
    held = np.diff(np.array(made.edges))
    assert set(sizes_of(made)) == {100}
    assert (held > 0).sum(0).max() == 2
    assert set(held.ravel().tolist()) <= {0, 50, 100}


def test_shuffled_classes_are_not_cut_in_file_order():
    """Files are often sorted: a client must not get the first images of each class."""
    labels = np.zeros(1000, np.int64)
    found = PartitionSpec("dirichlet", 2, 3, 100.0).of_counts([1000]).indices(0, labels)
    assert 400 < np.median(found) < 600
    assert found.max() > 900


def sizes_of(made):
    return tuple(sum(np.diff(np.array(made.edges))).tolist())


def test_empty_clients_get_one_sample_of_the_largest():
    """At alpha 1e-6 one client draws nearly all of a class; the others must get one sample."""
    made = PartitionSpec("dirichlet", 5, 1, 1e-6).of_counts([40])
    assert sorted(sizes_of(made)) == [1, 1, 1, 1, 36]
    # The client with the most gives next, the lower number first, from its larger class.
    assert _without_empty([[5, 4, 0, 0, 0]]) == [[3, 3, 1, 1, 1]]
    assert _without_empty([[1, 0], [3, 0]]) == [[1, 0], [2, 1]]


def test_data_other_than_those_counted_are_refused(tmp_path):
    """A site with another version of the data would train on samples of other sites."""
    made = PartitionSpec("dirichlet", 2).of_counts([2, 3])
    for labels, text in (
        ([0, 0, 1, 1], "class 1 has 2 samples here and 3 in the run"),
        ([0, 0, 1, 1, 2], "class 1 has 2 samples here and 3"),
        ([0, 0, 1, 1, 1, 2], "class 2 has 1 samples here and 0"),
    ):
        with pytest.raises(DataError, match=text):
            made.indices(0, np.array(labels))
    with pytest.raises(DataError, match="needs the samples' labels"):
        made.indices(0)
    with pytest.raises(DataError, match="3 samples here, 5 in the run"):
        PartitionSpec("iid", 2).of_counts([5]).indices(0, np.zeros(3, np.int64))
    with pytest.raises(IndexError):
        made.indices(2, np.array([0, 0, 1, 1, 1]))
    unlabeled = Arrays("x", [np.zeros((7, 2))])
    PartitionSpec("iid", 3).check_labels(unlabeled)
    with pytest.raises(DataError, match="has no labels, which dirichlet needs: use iid"):
        PartitionSpec("dirichlet", 3).check_labels(unlabeled)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ({"kind": "dirichlet", "clients": 2, "alpha": 0.0}, "alpha is 0: must be above 0"),
        ({"kind": "dirichlet", "clients": 2, "alpha": -1.0}, "alpha is -1: must be above 0"),
        ({"kind": "dirichlet", "clients": 2, "alpha": float("nan")}, "alpha is nan"),
        ({"kind": "dirichlet", "clients": 2, "alpha": 1e7}, "alpha is 1e"),
        ({"kind": "iid", "clients": 0}, "0 clients: give at least 1"),
        ({"kind": "x", "clients": 1}, "partition 'x': use iid or dirichlet or dirichlet-equal or"),
        ({"kind": "dirichlet", "clients": 1001, "counts": [100] * 100}, "exceed 100,000 shares"),
        ({"kind": "iid", "clients": 2, "counts": []}, "2 clients, but 0 samples"),
        ({"kind": "iid", "clients": 1, "counts": [5, -1]}, "samples"),
        ({"kind": "sorted", "clients": 10, "counts": [19]}, "10 clients times 2 pieces, but 19"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(how, text):
    """A user's typing error is one line, and does not start an hour of computing."""
    counts = how.pop("counts", [99])
    with pytest.raises(DataError, match=text):
        PartitionSpec(**how).of_counts(counts)
