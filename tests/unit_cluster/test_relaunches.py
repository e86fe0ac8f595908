"""When a client that died is launched again: the launch file and the decision, without sessions or
processes.
"""

import pytest

from fsl_async.cluster.launch_file import LaunchRule, read_launching
from fsl_async.cluster.relaunches import GaveUp, Relaunches, Waiting
from fsl_async.errors import ConfigError
from fsl_async.roles.goodbye import Goodbye

FILE = """
first_wait_s = 2
budget = 2
healthy_after_s = 60
[[launcher]]
clients = "a100-*"
kind = "slurm"
command = ["job.sbatch", "{name}", "{address}"]
[[launcher]]
clients = "[ab]*"
kind = "local"
command = ["fsl-node", "--name={name}"]
"""


def made():
    return Relaunches(read_launching(FILE, "f"))


def test_the_first_pattern_that_fits_is_the_launcher():
    """Sites have launchers of their own; a client that no pattern names is nobody's."""
    launching = read_launching(FILE, "f")
    assert launching.rule_of("a100-3").kind == "slurm"
    assert launching.rule_of("alice").kind == "local"
    assert launching.rule_of("carol") is None
    words = launching.rule_of("a100-3").words("a100-3", "tcp://h:1")
    assert words == ("job.sbatch", "a100-3", "tcp://h:1")
    assert LaunchRule("*", "command", ("{x}",)).words("n", "a") == ("{x}",)
    assert (launching.restarts.budget, launching.restarts.first_wait_s) == (2, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("=", "not TOML"),
        ("a = " + "[" * 5000, "not TOML"),
        ("budget = " + "9" * 5000, "not TOML"),
        ("", r"at least one \[\[launcher\]\]"),
        ("launcher = 3", r"at least one \[\[launcher\]\]"),
        (
            '[[launcher]]\nclients="*"\nkind="k8s"\ncommand=["x"]',
            "launcher 1: kind must be one of local",
        ),
        (
            '[[launcher]]\nclients="*"\nkind="slurm"\ncommand=["--job-name=x", "j"]',
            "leave --job-name",
        ),
        ('[[launcher]]\nclients="*"\nkind="slurm"\ncommand=["-J", "x", "j"]', "leave --job-name"),
        ('[[launcher]]\nclients="*"\nkind="local"\ncommand="x y"', "array of words"),
        ('[[launcher]]\nclients="*"\nkind="local"\ncommand=[]', "array of words"),
        ('[[launcher]]\nclients=""\nkind="local"\ncommand=["x"]', "pattern"),
        ('[[launcher]]\nclients="*"\nkind="local"', "exactly the keys"),
        ('wait=1\n[[launcher]]\nclients="*"\nkind="local"\ncommand=["x"]', "wait: unknown key"),
        ('budget=1.5\n[[launcher]]\nclients="*"\nkind="local"\ncommand=["x"]', "budget: must be"),
        ('factor=0.5\n[[launcher]]\nclients="*"\nkind="local"\ncommand=["x"]', "factor: must be"),
    ],
)
def test_a_wrong_launch_file_is_one_line(text, words):
    """It is read before the run begins: a wrong one must not show at the first death."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_launching(text, "f.toml")
    assert caught.value.message.startswith("f.toml: ")
    assert "\n" not in caught.value.message


def test_a_client_that_expires_is_asked_for_once():
    """Once: a job in Slurm's queue may take a day to start."""
    one = made()
    one.seen("alice", 0.0)
    assert one.left("alice", "expired", 10.0) == Waiting("alice", 2.0)
    assert one.left("alice", "expired", 10.5) is None
    assert one.next_due() == 12.0
    assert one.take_due(11.9) == []
    assert one.take_due(12.0) == ["alice"]
    assert (one.take_due(1e6), one.next_due()) == ([], None)


@pytest.mark.parametrize("reason", ["bye", "superseded", "reset", "protocol"])
def test_other_ends_of_a_session_are_no_death(reason):
    """Who says goodbye and no more is done, the others come back at once: two of a name would
    fight.
    """
    one = made()
    one.seen("alice", 0.0)
    assert one.left("alice", reason, 10.0) is None
    assert one.next_due() is None
    assert one.left("carol", "expired", 10.0) is None, "never seen"


def test_a_goodbye_that_asks_for_a_launch_is_a_death():
    """A client that ended itself because training hung says goodbye first: nobody would start it
    again.
    """
    one = made()
    one.seen("alice", 0.0)
    hung = Goodbye("training hangs", 0.0)
    assert one.left("alice", "bye", 10.0, hung) == Waiting("alice", 2.0, "training hangs")
    assert one.left("alice", "bye", 10.1, hung) is None
    assert one.take_due(12.0) == ["alice"]
    assert (one.take_due(1e6), one.next_due()) == ([], None), "once"


def test_goodbyes_in_a_row_wait_longer_and_use_the_budget_up():
    """A machine on which training hangs at once, again and again."""
    one, hung = made(), Goodbye("training hangs", 0.0)
    for now, said in (
        (10.0, Waiting("alice", 2.0, "training hangs")),
        (40.0, Waiting("alice", 4.0, "training hangs")),
        (70.0, GaveUp("alice", "gave up after 2 relaunches in a row")),
    ):
        one.seen("alice", now - 5.0)
        assert one.left("alice", "bye", now, hung) == said
        one.take_due(now + 20.0)


def test_a_place_that_is_taken_away_is_not_launched_on_before_that():
    """Two minutes ahead of its end a spot instance would start the client again, which would be
    told again; but no client sets the server's timer for hours.
    """
    one = made()
    one.seen("alice", 0.0)
    said = one.left("alice", "bye", 10.0, Goodbye("EC2 spot (terminate)", 100.0))
    assert said == Waiting("alice", 102.0, "EC2 spot (terminate)")
    assert one.take_due(111.9) == []
    one.seen("bob", 0.0)
    assert one.left("bob", "bye", 10.0, Goodbye("liar", 9999.0)).seconds == 602.0


def test_only_a_goodbye_is_read():
    """What the transport says of an end of its own is no wish of the client's."""
    one = made()
    one.seen("alice", 0.0)
    for reason in ("reset", "superseded", "protocol"):
        assert one.left("alice", reason, 10.0, Goodbye("no", 0.0)) is None
    assert one.next_due() is None
    assert one.left("alice", "revoked", 10.0, Goodbye("no", 0.0)) is None
    assert one.left("alice", "expired", 11.0) is None, "its key is not let in any more"


def test_the_exit_after_such_a_goodbye_is_no_second_death():
    """A child of the server's says goodbye and exits 64: one launch, one of the budget."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "bye", 10.0, Goodbye("SIGTERM", 0.0))
    assert one.exited("alice", 64, 10.5) is None
    assert one.next_due() == 12.0


def test_a_person_who_interrupts_a_child_means_it():
    """Its exit may be seen before its goodbye is read."""
    one = made()
    one.seen("alice", 0.0)
    assert one.exited("alice", 130, 10.0) is None
    assert one.left("alice", "bye", 10.1) is None
    assert one.next_due() is None


def test_a_job_that_waited_long_and_dies_at_once_is_not_healthy():
    """An hour in a queue is no hour of work: it would be submitted again for ever, without a longer
    wait.
    """
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.take_due(12.0)
    one.seen("alice", 3600.0)
    assert one.left("alice", "expired", 3605.0) == Waiting("alice", 4.0)
    one.take_due(3609.0)
    one.seen("alice", 3610.0)
    one.seen("alice", 3665.0)  # a session of the same life
    assert one.left("alice", "expired", 3671.0) == Waiting("alice", 2.0)


def test_a_server_that_starts_again_asks_for_who_does_not_come_back():
    """It died while nobody watched; those who live say hello within the time of a session, and who
    has no rule is nobody's.
    """
    one = made()
    said = one.recovered(["amy", "bob", "carol"], 20.0, 100.0)
    assert said == [Waiting("amy", 22.0), Waiting("bob", 22.0)]
    one.seen("bob", 121.0)
    assert one.take_due(121.9) == []
    assert one.take_due(122.0) == ["amy"]
    assert (one.take_due(1e6), one.next_due()) == ([], None)
    assert one.failed("amy", 130.0) == Waiting("amy", 4.0), "of the same budget"


def test_members_are_who_did_not_say_that_it_is_over():
    """What the next server is told: one that died, was put out, or wants to come back; not one that
    is done or not let in any more.
    """
    one = made()
    for name in ("amy", "bea", "bob", "bud", "ada", "abe", "carol", "cleo"):
        one.seen(name, 0.0)
    one.left("amy", "expired", 1.0)
    one.left("bea", "bye", 1.0, Goodbye("SIGTERM", 5.0))
    one.left("bob", "superseded", 1.0)
    one.left("bud", "bye", 1.0)
    one.left("ada", "revoked", 1.0)
    one.exited("abe", 2, 1.0)
    one.left("cleo", "bye", 1.0)
    assert one.members == {"amy", "bea", "bob", "carol"}
    one.exited("bob", 130, 2.0)
    one.exited("amy", 64, 2.0)
    assert one.members == {"amy", "bea", "carol"}


def test_a_goodbye_after_an_exit_that_was_seen_is_the_past():
    """A child that failed is about to be launched again: the next server must know of it."""
    one = made()
    one.seen("amy", 0.0)
    assert one.exited("amy", 1, 1.0) == Waiting("amy", 2.0)
    assert one.left("amy", "bye", 1.1) is None
    assert one.members == {"amy"}


def test_who_comes_back_by_itself_is_not_launched():
    """A line that was cut for half a minute, or a supervisor at the site that was faster."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.seen("alice", 11.0)
    assert one.take_due(100.0) == []


def test_a_launcher_that_fails_is_asked_again_later_within_the_budget():
    """Back-off and an end: a wrong command must not be run for ever."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.take_due(12.0)
    assert one.failed("alice", 12.0) == Waiting("alice", 4.0)
    assert one.take_due(16.0) == ["alice"]
    assert one.failed("alice", 16.0) == GaveUp("alice", "gave up after 2 relaunches in a row")
    assert one.next_due() is None
    one.seen("alice", 20.0)  # somebody started it by hand
    assert one.left("alice", "expired", 30.0) == Waiting("alice", 2.0)


def test_deaths_in_a_row_wait_longer_and_a_healthy_minute_forgives():
    """A client that dies as soon as it is there must not be launched every two seconds."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.take_due(12.0)
    one.seen("alice", 14.0)
    assert one.left("alice", "expired", 20.0) == Waiting("alice", 4.0)
    one.take_due(24.0)
    one.seen("alice", 25.0)
    assert one.left("alice", "expired", 90.0) == Waiting("alice", 2.0)


def test_an_exit_that_is_seen_is_acted_on_at_once_and_once():
    """The session of the dead process expires while the next one is starting: that must not end the
    next one.
    """
    machine = made()
    machine.seen("alice", 0.0)
    assert machine.exited("alice", -9, 100.0) == Waiting("alice", 2.0)
    assert machine.take_due(102.0) == ["alice"]
    assert machine.left("alice", "expired", 103.0) is None
    assert machine.next_due() is None
    machine.seen("alice", 105.0)
    assert machine.left("alice", "expired", 300.0) == Waiting("alice", 2.0)


def test_a_child_that_another_process_put_out_is_not_the_end_of_that_one():
    """Somebody starts alice elsewhere: the server's own child is refused from then on, and ends.
    The other one lives on, and is cared for.
    """
    machine = made()
    machine.seen("alice", 0.0)
    assert machine.left("alice", "superseded", 100.0) is None
    machine.seen("alice", 100.0)
    assert machine.exited("alice", 2, 101.0) is None
    assert machine.members == {"alice"}
    assert machine.left("alice", "expired", 200.0) == Waiting("alice", 2.0)
    machine.take_due(202.0)
    machine.seen("alice", 203.0)
    assert machine.exited("alice", 2, 204.0) == GaveUp("alice", "bad input")


def test_who_was_put_out_and_left_for_another_reason_since_ends_as_ever():
    """What ended by a connection that changed does not hide what ends later."""
    machine = made()
    machine.seen("alice", 0.0)
    machine.left("alice", "superseded", 100.0)
    machine.seen("alice", 100.0)
    machine.left("alice", "bye", 150.0)
    machine.seen("alice", 160.0)
    assert machine.exited("alice", 2, 204.0) == GaveUp("alice", "bad input")


def test_exit_codes_say_what_an_expired_session_cannot():
    """Who was preempted said goodbye and wants to come back; who is done, or was called wrongly,
    does not.
    """
    machine = made()
    machine.seen("alice", 0.0)
    assert machine.left("alice", "bye", 50.0) is None
    assert machine.exited("alice", 64, 51.0) == Waiting("alice", 2.0)
    machine.seen("bob", 0.0)
    machine.left("bob", "bye", 50.0)
    assert machine.exited("bob", 0, 51.0) is None
    machine.seen("amy", 0.0)
    assert machine.exited("amy", 2, 51.0) == GaveUp("amy", "bad input")
    assert machine.exited("nobody", -9, 51.0) is None
