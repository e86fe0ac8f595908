"""The budget's file: what is counted there is never lost, and no step is made beyond the plan."""

import os
import stat

import pytest
from attrs import evolve

from fsl_async.errors import PrivacyError, describe
from fsl_async.files import files
from fsl_async.files.checksummed_json import from_checksummed
from fsl_async.learn.tune.privacy import Budget, Spent

WANTED = Spent(run="notes", client="site-a", epsilon=6.0, delta=1e-5, sample_rate=0.25, steps=3)


def begun(folder, wanted=WANTED, run="notes", client="site-a", noise=0.7):
    return Budget(folder, evolve(wanted, run=run, client=client), lambda _: noise)


def test_a_relaunch_goes_on_with_the_same_noise_and_count(tmp_path):
    """Noise planned anew for what is left would give another budget."""
    first = begun(tmp_path / "privacy")
    first.charge()
    first.charge()
    again = begun(tmp_path / "privacy", noise=99.0)
    assert again.spent == first.spent
    assert (again.spent.noise, again.spent.done) == (0.7, 2)


def test_nothing_is_spent_beyond_the_plan_by_any_process(tmp_path):
    """Also where the old process of a client lives on beside the new one."""
    one, other = begun(tmp_path), begun(tmp_path)
    one.charge()
    other.charge()
    one.charge()
    for each in (one, other, begun(tmp_path)):
        with pytest.raises(PrivacyError, match="budget of run notes is used up") as caught:
            each.charge()
        assert "\n" not in caught.value.message
        assert describe(caught.value).exit_code == 2


def test_a_longer_run_does_not_get_more_steps(tmp_path):
    """run.rounds may be raised between starts; the noise was made for the first plan."""
    begun(tmp_path)
    again = begun(tmp_path, evolve(WANTED, steps=1000))
    assert again.spent.steps == 3


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"sample_rate": 0.5}, "sample_rate"),
        ({"epsilon": 8.0}, "epsilon"),
        ({"delta": 0.1}, "delta"),
    ],
)
def test_other_data_or_another_budget_is_refused(tmp_path, change, name):
    """The noise does not fit them, and a server could ask for more after every restart."""
    begun(tmp_path)
    with pytest.raises(PrivacyError, match=f"planned with {name}"):
        begun(tmp_path, evolve(WANTED, **change))


def test_runs_and_clients_have_budgets_of_their_own(tmp_path):
    """As documented: they add up, and nothing here counts that."""
    begun(tmp_path).charge()
    assert begun(tmp_path, run="other").spent.done == 0
    assert begun(tmp_path, client="site-b").spent.done == 0


@pytest.mark.parametrize("run", ["../notes", "a/b", "", "a@b"])
def test_a_name_of_the_server_leads_to_no_other_file(tmp_path, run):
    """The run's name comes over the network."""
    with pytest.raises(PrivacyError, match="is no name"):
        begun(tmp_path / "privacy", run=run)
    assert not list(tmp_path.iterdir())


def test_a_name_of_dots_stays_in_the_folder(tmp_path):
    """Two dots are a name by its form."""
    assert begun(tmp_path, run="..").path.parent == tmp_path


def flipped(data):
    return data.replace(b'"done":2', b'"done":0')


@pytest.mark.parametrize(
    "damage",
    [flipped, lambda data: data[:40], lambda _: b"", lambda data: data * 100, lambda _: b"\0" * 99],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, damage):
    """What it counted is unknown, so no step may follow: at a start, and in the middle of a run."""
    budget = begun(tmp_path)
    budget.charge()
    budget.charge()
    budget.path.write_bytes(damage(budget.path.read_bytes()))
    for use in (budget.charge, lambda: begun(tmp_path)):
        with pytest.raises(PrivacyError, match="damaged; restore it from a backup") as caught:
            use()
        assert "\n" not in caught.value.message


def test_a_file_that_was_removed_or_is_old_gives_no_steps_back(tmp_path):
    """A process that has counted more than the file keeps its count."""
    budget = begun(tmp_path)
    old = budget.path.read_bytes()
    budget.charge()
    budget.charge()
    budget.path.write_bytes(old)
    budget.charge()
    assert budget.spent.done == 3
    budget.path.unlink()
    with pytest.raises(PrivacyError, match="is gone"):
        budget.charge()


def test_the_file_is_private(tmp_path):
    """How often a site trains on its records is its own affair."""
    before = os.umask(0)
    try:
        budget = begun(tmp_path / "new" / "privacy")
    finally:
        os.umask(before)
    assert stat.S_IMODE(budget.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(budget.path.parent.stat().st_mode) == 0o700


class KilledError(Exception):
    """The process ends here."""


@pytest.mark.parametrize("syncs", range(4))
def test_a_kill_at_any_point_overcounts_by_one_step_at_most(tmp_path, monkeypatch, syncs):
    """A step may be counted and not made, never made and not counted."""
    budget = begun(tmp_path)
    budget.charge()
    calls = []

    def fsync(_):
        calls.append(budget.path.read_bytes())
        if len(calls) > syncs:
            raise KilledError

    monkeypatch.setattr(files.os, "fsync", fsync)
    made = 1 + _charged_before_the_kill(budget)
    monkeypatch.undo()
    counted = begun(tmp_path).spent.done
    assert made <= counted <= made + 1
    assert (made, counted) == [(1, 1), (1, 2), (2, 2), (2, 3)][syncs]


def test_a_count_is_synced_before_and_after_its_rename(tmp_path, monkeypatch):
    """Otherwise a power cut leaves an empty file, or the old count after the step was made."""
    budget = begun(tmp_path)
    order = []
    monkeypatch.setattr(files.os, "fsync", lambda _: order.append(_done(budget.path)))
    budget.charge()
    assert order == [0, 1]


def _charged_before_the_kill(budget):
    for made in range(2):
        try:
            budget.charge()
        except KilledError:
            return made
    pytest.fail("there was no kill")


def _done(path):
    return from_checksummed(path.read_bytes().strip())["done"]
