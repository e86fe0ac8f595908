"""The arguments of a simulated run: links, rates, and runs that cannot be simulated."""

import pytest

from fsl_async.config.load import load
from fsl_async.errors import UsageError
from fsl_async.tools.sim.settings import (
    PROFILES,
    Link,
    TaskSettings,
    bytes_of,
    check_simulated,
    read_link,
    read_rates,
)


def test_a_link_has_unequal_rates_a_delay_and_a_loss():
    """Rates are bits in the text and bytes here."""
    assert read_link("10mbit:50mbit,30ms,0.5%") == Link(1.25e6, 6.25e6, 0.03, 0.005)
    assert read_link("8mbit,20ms") == Link(1e6, 1e6, 0.02)
    assert read_link("8mbit").delay_s == 0


@pytest.mark.parametrize("text", ["fast", "8mbit,30ms,90%", "8mbit,30ms,x", "8mbit,1ms,0%,0%"])
def test_a_wrong_link_is_refused_with_an_example(text):
    """One line, which names the option."""
    with pytest.raises(UsageError, match="--link"):
        read_link(text)


def test_the_faults_of_a_profile_are_added_to_the_link():
    """Losses of two causes multiply; each direction has its own rate."""
    up, down = Link(1e6, 2e6, 0.5, 0.1).conditions(PROFILES["storm"])
    assert (up.bytes_per_s, down.bytes_per_s, up.delay_s) == (1e6, 2e6, 0.5)
    assert up.drop == pytest.approx(1 - 0.9 * (1 - PROFILES["storm"].drop))
    assert Link().conditions(PROFILES["none"])[0].delay_s == PROFILES["none"].delay_s


def test_rates_and_links_are_repeated_over_the_clients():
    """The fourth client of three rates has the first one."""
    links = (Link(), Link(1e6))
    settings = TaskSettings(clients=5, rates=read_rates("1,1,0.3"), links=links)
    assert [settings.rate_of(number) for number in range(5)] == [1, 1, 0.3, 1, 1]
    assert settings.link_of(3) is links[1]


@pytest.mark.parametrize("text", ["", "0", "1,-1", "fast", "nan"])
def test_rates_that_are_no_speeds_are_refused(text):
    """A client of rate 0 would never end its first step."""
    with pytest.raises(UsageError, match="--rates"):
        read_rates(text)


@pytest.mark.parametrize(
    ("override", "hours", "words"),
    [("run.name=run", None, "no end"), ("train.decay_at=2030-01-01T00:00:00+00:00", 1.0, "date")],
)
def test_runs_that_cannot_be_simulated_are_refused_in_one_line(override, hours, words):
    """The line has what to do instead."""
    with pytest.raises(UsageError, match=words) as refused:
        check_simulated(load(None, [override]), TaskSettings(clients=2, hours=hours))
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "wrong", [{"clients": 0}, {"workers": 0}, {"resident": 0}, {"hours": 0.0}, {"step_seconds": -1}]
)
def test_numbers_that_are_too_small_are_refused_by_name(wrong):
    """The line has the argument and its value."""
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=f"{name}={value:g}: "):
        TaskSettings(**{"clients": 2, **wrong})


def test_the_memory_of_a_client_is_that_of_seven_models():
    """Weights, gradients, two moments, and three vectors of the exchange, 4 bytes a value."""
    assert sum(bytes_of(1_000)) == 4 * 1_000 * 7
