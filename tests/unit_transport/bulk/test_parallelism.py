"""How many stripes: trials up and down, long lines, limits."""

import math

from fsl_transport.bulk.parallelism import (
    BEGIN_BYTES,
    DOWN_S,
    FIRST_WAIT_S,
    LONG_FIRST,
    LONGEST_WAIT_S,
    Parallelism,
    Trial,
)

KIB = 1024


def count_on(
    line, seconds, *, machine=None, limit=64, begun=0.0, idle=lambda now: False, round_trip_s=0.01, worth=1
):  # fmt: skip
    """Lets the machine choose on a line that brings ``line(stripes)`` bytes a second."""
    machine = machine or Parallelism(1, limit)
    delivered, now, path = 0.0, begun, [machine.count]
    machine.forget_epoch()
    while now < begun + seconds:
        now += 0.02
        delivered += 0.02 * line(machine.count)
        if idle(now):
            machine.rest(now)
        elif machine.feed(
            now, int(delivered), open_count=machine.count, round_trip_s=round_trip_s, worth=worth
        ):
            path.append(machine.count)
    return machine, path


def test_stripes_are_doubled_while_that_brings_more():
    """One stream carries 1 MB/s, the line 25: some thirty are needed, and found within seconds."""
    machine, path = count_on(lambda n: min(1e6 * n, 25e6), 12)
    assert path[:7] == [1, 2, 4, 8, 16, 32, 64]
    assert machine.count == 32
    _, path = count_on(lambda n: min(1e6 * n, 25e6), 600, machine=machine, begun=100.0)
    assert set(path) <= {16, 32, 64}
    assert path.count(16) + path.count(64) < 20  # it looks less and less often
    assert machine.count == 32


def test_a_long_line_is_begun_with_several():
    """There a trial takes more than a second and a stream's slow start several: from one on, half a minute went by before a line was full."""
    machine, path = count_on(lambda n: min(1e6 * n, 25e6), 6, round_trip_s=0.09)
    assert path[:3] == [1, LONG_FIRST, 2 * LONG_FIRST], (
        "the round trip is known with the first answer"
    )
    assert machine.count == 2 * LONG_FIRST
    machine, _ = count_on(lambda n: 1.25e6, 300, round_trip_s=0.09)
    assert machine.count == 1, "taken back where one fills the line"
    _, path = count_on(lambda n: 1e6 * n, 1, machine=machine, begun=400.0, round_trip_s=0.09)
    assert path == [1], "what was found is begun with"
    machine, _ = count_on(lambda n: 1e6 * n, 3, limit=4, round_trip_s=0.09)
    assert machine.count == 4
    machine = Parallelism(2 * LONG_FIRST, 64)
    machine.feed(0.0, 0, open_count=2 * LONG_FIRST, round_trip_s=0.09, worth=1)
    assert machine.count == 2 * LONG_FIRST, "never fewer than were asked for"


def test_a_long_line_is_begun_with_several_also_where_nothing_ever_waits():
    """A model of 64 KB at the end of each round never waits for a window, and over one connection it took three round trips."""
    machine = Parallelism(1, 64)
    assert not machine.begin(BEGIN_BYTES - 1, 0.09), "a process may be late with its first answers"
    assert not machine.begin(BEGIN_BYTES, 0.0), "nothing was answered so far"
    assert machine.begin(BEGIN_BYTES, 0.09)
    assert (machine.count, machine.trial) == (LONG_FIRST, Trial.GROWING)
    assert not machine.begin(1 << 30, 0.09)
    _, path = count_on(lambda n: 1e6 * n, 2, machine=machine, round_trip_s=0.09, worth=40)
    assert path[:2] == [LONG_FIRST, 40], "it goes on growing"
    short, few, fixed = Parallelism(1, 64), Parallelism(1, 4), Parallelism(2, 2)
    assert not short.begin(BEGIN_BYTES, 0.001)
    assert not short.begin(BEGIN_BYTES, 0.09), "it was short"
    assert few.begin(BEGIN_BYTES, 0.09)
    assert not fixed.begin(BEGIN_BYTES, 0.09)
    assert (short.count, few.count, fixed.count) == (1, 4, 2)


def test_there_are_as_many_as_the_window_of_a_long_line_is_worth():
    """It grows faster than trials could follow; once it has stopped, trials go on."""
    machine, path = count_on(lambda n: 1e6 * n, 1.0, round_trip_s=0.09, worth=40)
    assert path == [1, 40]
    assert machine.trial is Trial.GROWING
    machine, path = count_on(lambda n: 1e6 * n, 6, round_trip_s=0.09, worth=100)
    assert path == [1, 64], "no trial with fewer for a while"
    _, path = count_on(lambda n: 1e6 * n, DOWN_S, machine=machine, begun=6.0, round_trip_s=0.09)
    assert path == [64, 32, 64], "then there is one, on its own account"
    _, path = count_on(lambda n: 1e6 * n, 6, round_trip_s=0.01, worth=100)
    assert path[:3] == [1, 2, 4], "a short line is tried out from below"
    machine = Parallelism(1, 64)
    assert machine.feed(0.0, 1, open_count=1, round_trip_s=0.05, worth=1)
    assert machine.feed(0.1, 1, open_count=16, round_trip_s=0.001, worth=64)
    assert (machine.count, machine.trial) == (1, Trial.HOLD), "the first answer was late"
    machine = Parallelism(4, 64)
    machine.feed(0.0, 1, open_count=4, round_trip_s=0.05, worth=1)
    machine.feed(0.1, 1, open_count=16, round_trip_s=0.001, worth=64)
    assert machine.count == 4, "never fewer than were asked for"


def test_a_line_that_was_taken_for_a_long_one_is_tried_out_from_below():
    """Whenever that is seen, and unless a trial has shown that many are of use."""

    def line(count):
        return 100e6 / count**0.5

    machine, _ = count_on(line, 2, round_trip_s=0.03, worth=64)
    assert machine.count >= LONG_FIRST
    machine, path = count_on(line, 5, machine=machine, begun=2.0, round_trip_s=0.015, worth=64)
    assert path[1:] == [1, 2, 1]
    machine, path = count_on(lambda n: 1e6 * n, 4, round_trip_s=0.03, worth=1)
    assert machine.count == 2 * LONG_FIRST
    _, path = count_on(lambda n: 1e6 * n, 2, machine=machine, begun=4.0, round_trip_s=0.015)
    assert path == [32, 64]


def test_more_that_brings_less_is_a_failure_where_fewer_bring_more_again():
    """Where a router has too little processor time for small packets each trial with more costs; the line has not fallen."""
    machine = Parallelism(16, 64)
    machine._judge(357.0, 0.0)
    assert (machine.trial, machine.count) == (Trial.UP, 32)
    machine._judge(246.0, 1.0)
    assert (machine.trial, machine.count) == (Trial.HOLD, 16)
    machine._judge(334.0, 2.0)
    assert (machine.trial, machine.count) == (Trial.HOLD, 16)
    machine._judge(334.0, 2.0 + FIRST_WAIT_S)
    assert (machine.trial, machine.count) == (Trial.DOWN, 8)


def test_a_doubt_is_of_the_trial_just_before():
    """What a trial brought an hour ago says nothing of now."""
    machine = Parallelism(16, 64)
    for rate, now in ((100.0, 0.0), (50.0, 1.0), (50.0, 2.0)):
        machine._judge(rate, now)
    assert (machine.trial, machine.count) == (Trial.UP, 32), "the line fell, and it goes on"
    machine._judge(50.0, 3.0)
    machine._judge(500.0, 4.0)
    assert machine._failures == 1, "the same as before is a failure by itself, and once"


def test_a_line_on_which_each_connection_costs_is_left_to_one():
    """Also by who was begun with too many, and where twice as many bring only a tenth less."""
    machine = Parallelism(1, 64)
    machine.count = 16
    _, path = count_on(lambda n: 40e6 * 0.9 ** math.log2(n), 300, machine=machine)
    assert machine.count == 1
    assert len(path) < 20


def test_a_new_session_keeps_what_a_long_line_was_begun_with():
    """Its round trip is not known at first, which does not mean that it is short."""
    machine = Parallelism(1, 64)
    assert machine.begin(BEGIN_BYTES, 0.09)
    machine.forget_epoch()
    assert not machine.feed(10.0, 0, open_count=LONG_FIRST, round_trip_s=0.0, worth=1)
    assert machine.count == LONG_FIRST


def test_a_trial_with_fewer_that_failed_has_shown_what_many_are_good_for():
    """One round trip below the limit between long and short takes nothing away any more."""
    machine, path = count_on(lambda n: min(2e6 * n, 25e6), 120, round_trip_s=0.03, worth=16)
    assert machine.count == LONG_FIRST
    assert LONG_FIRST // 2 in path
    _, path = count_on(
        lambda n: min(2e6 * n, 25e6), 1, machine=machine, begun=120.0, round_trip_s=0.019
    )
    assert min(path) >= LONG_FIRST // 2


def test_so_has_one_that_brought_a_little_less_for_long():
    """Seven hundredths are no reason to go back at once, and one after a slow start's time."""

    def line(count):
        return 25e6 if count >= LONG_FIRST else 23e6

    machine, path = count_on(line, 60, round_trip_s=0.03, worth=16)
    assert (machine.count, LONG_FIRST // 2 in path) == (LONG_FIRST, True)
    _, path = count_on(line, 1, machine=machine, begun=60.0, round_trip_s=0.019)
    assert 1 not in path


def test_a_session_s_doubt_ends_with_it():
    """What the next one measures is compared with what it measured."""
    machine = Parallelism(16, 64)
    machine._judge(100.0, 0.0)
    machine._judge(50.0, 1.0)
    machine.forget_epoch()
    machine._judge(100.0, 3600.0)
    assert (machine.trial, machine.count) == (Trial.UP, 32)


def test_a_short_line_that_was_taken_for_a_long_one_is_tried_out_at_once():
    """What long waits its trials had before says nothing of it."""
    machine, _ = count_on(lambda n: 25e6, 40, round_trip_s=0.03, worth=64)
    machine.count, machine._grown_from, machine._failures = 64, 1, 7
    _, path = count_on(lambda n: 1e6 * n, 8, machine=machine, begun=40.0, round_trip_s=0.01)
    assert path[:4] == [64, 1, 2, 4]


def test_other_settings_bound_what_a_long_line_goes_back_to():
    """They come with a session's welcome."""
    for first, limit, back in ((1, 4, 1), (4, 64, 4)):
        machine = Parallelism(8 if limit == 4 else 1, 64)
        machine.begin(BEGIN_BYTES, 0.09)
        machine.bound(first, limit)
        machine.feed(0.1, 1, open_count=16, round_trip_s=0.001, worth=64)
        assert machine.count == (min(8, limit) if limit == 4 else back)


def test_a_line_that_fell_meanwhile_is_no_failure():
    """After its slow start a stream falls for seconds: trials against that must not put the search off ever longer."""
    fell, same = Parallelism(1, 64), Parallelism(1, 64)
    for machine in (fell, same):
        machine._judge(10.0, 0.0)
        assert (machine.trial, machine.count) == (Trial.UP, 2)
    fell._judge(5.0, 1.0)
    same._judge(10.0, 1.0)
    assert fell.count == same.count == 1
    fell._judge(5.0, 2.0)
    same._judge(10.0, 2.0)
    assert (fell.trial, same.trial) == (Trial.UP, Trial.HOLD)


def test_a_line_that_one_stream_fills_keeps_one():
    """More of them would only fight over it."""
    machine, path = count_on(lambda n: 1.25e6, 300)
    assert machine.count == 1
    assert set(path) == {1, 2}
    assert len(path) < 16


def test_fewer_are_tried_for_as_long_as_a_slow_start_lasts():
    """Half as many carry the same for some seconds, until losses have taken what their slow start gave them."""
    machine = Parallelism(1, 64)
    machine.count, machine.trial, machine._failures = 32, Trial.HOLD, 1
    now, path = 0.0, []
    for _ in range(40):
        now += 1.0
        machine._judge(25e6 if machine.count == 32 or now < 7 else 18e6, now)
        path.append(machine.count)
    assert path[:9] == [16] * 7 + [32] * 2
    machine.count, machine.trial, machine._failures, machine._next_at = 4, Trial.HOLD, 1, 0.0
    path.clear()
    for _ in range(40):
        now += 1.0
        machine._judge(25e6, now)
        path.append(machine.count)
    assert path[:20] == [2] * 10 + [1] * 10, "half as many again only after that"


def test_a_number_that_is_set_is_no_subject_of_trials():
    """Who says how many there are to be wants no others."""
    _, path = count_on(lambda n: 25e6, 300, machine=Parallelism(8, 8), round_trip_s=0.09)
    assert path == [8]


def test_other_settings_bound_what_was_found():
    """A server that is started again may allow fewer, or none but what it says."""
    machine, _ = count_on(lambda n: 1e6 * n, 20)
    machine.bound(1, 64)
    assert machine.count >= 32
    machine.bound(1, 4)
    assert (machine.count, machine.limit, machine.trial) == (4, 4, Trial.HOLD)
    machine.bound(2, 2)
    machine, path = count_on(lambda n: 1e6 * n, 20, machine=machine)
    assert path == [2]
    machine.bound(1, 8)
    assert count_on(lambda n: 1e6 * n, 20, machine=machine)[0].count == 8
    machine = Parallelism(1, 64)
    machine.bound(4, 64)
    assert machine.count == 4, "more at the beginning, with the same limit"
    machine.bound(1, 64)
    assert machine.count == 4


def test_a_line_that_one_connection_fills_for_a_year():
    """Each trial that fails makes the next wait longer; their number has no end."""
    machine = Parallelism(2, 4)
    for number in range(1, 1100):
        machine._hold(float(number))
        assert machine._next_at <= number + LONGEST_WAIT_S
    assert machine._next_at == 1099 + LONGEST_WAIT_S


def test_a_setting_bounds_the_number():
    """An operator may say that so many are enough."""
    machine, path = count_on(lambda n: 1e6 * n, 60, limit=6)
    assert max(path) == 6
    assert machine.count == 6
    assert Parallelism(8, 4).count == 4


def test_a_line_that_changed_is_found():
    """Thirty streams for a line that lost its losses are too many, one for a line that got some too few."""
    machine, _ = count_on(lambda n: min(1e6 * n, 25e6), 20)
    machine, _ = count_on(lambda n: 25e6, 900, machine=machine, begun=20.0)
    assert machine.count <= 8
    machine, _ = count_on(lambda n: min(1e6 * n, 25e6), 900, machine=machine, begun=920.0)
    assert machine.count >= 16


def test_nothing_is_learned_while_there_is_nothing_to_send():
    """A slow encoder must not look like a slow line, nor a pause like one."""
    machine, path = count_on(lambda n: 1e6 * n, 60, idle=lambda now: int(now * 50) % 2 == 0)
    assert path == [1]
    machine.rest(60.0)
    assert machine.trial is Trial.HOLD
    machine, path = count_on(lambda n: 1e6 * n, 20, machine=machine, begun=100.0)
    assert machine.count > 8


def test_trials_wait_for_their_connections():
    """An epoch measured before the connections stand would say that they bring nothing."""
    machine = Parallelism(1, 64)
    now = 0.0
    while machine.count == 1:
        now += 0.02
        machine.feed(now, int(1e6 * now), open_count=1, round_trip_s=0.01, worth=1)
        assert now < 5
    asked_at = now
    while machine.count == 2:
        now += 0.02
        machine.feed(now, int(1e6 * now), open_count=1, round_trip_s=0.01, worth=1)
    assert now - asked_at > FIRST_WAIT_S
    assert machine.count == 1
