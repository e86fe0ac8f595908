"""Finding the vectors of which rows are mixtures, and finding none where there are none."""

import math

import numpy as np
import pytest
import torch

from fsl_async.tools.audit.membership import exposure, membership
from fsl_async.tools.audit.pursuit import chance, pursue

WIDTH, ATOMS = 96, 3000


def atoms(seed=0):
    return torch.randn(ATOMS, WIDTH, generator=torch.Generator().manual_seed(seed))


def mixed(chosen, rows, noise=0.0):
    drawn = torch.Generator().manual_seed(1)
    found = torch.randn(rows, len(chosen), generator=drawn) @ atoms()[chosen]
    return found + noise * torch.randn(rows, WIDTH, generator=drawn)


def numbers(mixtures, most=100):
    return pursue([mixtures], lambda: atoms().split(700), most, kept=1000)[0]


@pytest.mark.parametrize(("rows", "count"), [(16, 10), (8, 12), (20, 20)])
def test_all_atoms_are_found_and_no_other(rows, count):
    """Also where there are fewer rows than atoms."""
    chosen = list(range(5, ATOMS, ATOMS // count))[:count]
    assert sorted(numbers(mixed(chosen, rows))) == chosen
    assert len(numbers(mixed(chosen, rows), most=3)) == 3


def test_nothing_is_found_in_noise():
    """Chance is not taken for a word."""
    drawn = torch.Generator().manual_seed(7)
    assert numbers(torch.randn(16, WIDTH, generator=drawn)) == []
    assert numbers(mixed([3, 400, 900], 8, noise=300.0)) == []


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
def test_rows_without_a_number_have_no_atoms(value):
    assert numbers(torch.full((4, WIDTH), value)) == []
    assert numbers(torch.empty(0, WIDTH)) == []


def test_chance_grows_with_the_dimensions():
    assert 0 < chance(4, 384) < chance(16, 384) < 0.5 < chance(200, 384) < 1
    assert chance(384, 384) == 1.0


def test_members_are_told_by_how_much_less_is_lost():
    """Ties count as a half; 1 % of the others may be taken for members."""
    assert membership(np.array([2.0, 3.0]), np.array([0.0, 1.0])).auc == 1.0
    assert membership(np.ones(4), np.ones(5)).auc == 0.5
    others = np.arange(1000.0)
    found = membership(np.array([985.0, 995.0, 500.0, 0.0]), others)
    assert found.found == 0.25
    assert found.auc == pytest.approx((985.5 + 995.5 + 500.5 + 0.5) / 4000)


def test_exposure_is_the_rank_in_bits():
    random = np.arange(1.0, 1024.0)
    assert exposure(0.0, random) == 10.0
    assert exposure(512.0, random) == pytest.approx(1.0, abs=0.01)
    assert exposure(2000.0, random) == 0.0
