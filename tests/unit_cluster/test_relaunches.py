"""When a client that died is launched again: launch file and decisions, without sessions or
processes.
"""

import pytest

from fsl_async.cluster.restarts import End, LaunchRule, Relaunches, Wait, read_launching
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
    return Relaunches(read_launching(FILE, "f").restarts_of)


def test_the_first_pattern_that_fits_is_the_launcher():
    """A client that no pattern matches has no launcher."""
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
        ('[[launcher]]\nclients="*"\nkind="k8s"\ncommand=["x"]', "launcher 1: kind must be one of"),
        ('[[launcher]]\nclients="*"\nkind="slurm"\ncommand=["--job-name=x", "j"]', "leave --job"),
        ('[[launcher]]\nclients="*"\nkind="slurm"\ncommand=["-J", "x", "j"]', "leave --job-name"),
        ('[[launcher]]\nclients="*"\nkind="local"\ncommand="x y"', "array of words"),
        ('[[launcher]]\nclients="*"\nkind="local"\ncommand=[]', "array of words"),
        ('[[launcher]]\nclients=""\nkind="local"\ncommand=["x"]', "pattern"),
        ('[[launcher]]\nclients="*"\nkind="local"', "exactly the keys"),
        ('wait=1\n[[launcher]]\nclients="*"\nkind="local"\ncommand=["x"]', "wait: unknown key"),
        ('budget=1.5\n[[launcher]]\nclients="*"\nkind="local"\ncommand=["x"]', "budget: must be"),
        ('factor=0.5\n[[launcher]]\nclients="*"\nkind="local"\ncommand=["x"]', "factor: must be"),
    ],
)  # fmt: skip
def test_a_wrong_launch_file_is_one_line(text, words):
    """It is read before the run begins, so that an error does not show at the first death."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_launching(text, "f.toml")
    assert caught.value.message.startswith("f.toml: ")
    assert "\n" not in caught.value.message


def test_a_client_that_expires_is_launched_once():
    """A job may be in Slurm's queue for a day, so it is launched once."""
    one = made()
    one.seen("alice", 0.0)
    assert one.left("alice", "expired", 10.0) == Wait(2.0)
    assert one.left("alice", "expired", 10.5) is None
    assert one.next_due() == 12.0
    assert one.take_due(11.9) == []
    assert one.take_due(12.0) == ["alice"]
    assert (one.take_due(1e6), one.next_due()) == ([], None)


@pytest.mark.parametrize("reason", ["bye", "superseded", "reset", "protocol"])
def test_other_ends_of_a_session_are_no_death(reason):
    """A goodbye without request means done, and other ends are followed by a new session."""
    one = made()
    one.seen("alice", 0.0)
    assert one.left("alice", reason, 10.0) is None
    assert one.next_due() is None
    assert one.left("carol", "expired", 10.0) is None, "never seen"


def test_a_goodbye_that_asks_for_a_launch_is_a_death():
    """A client that ends itself because training hangs says goodbye first."""
    one = made()
    one.seen("alice", 0.0)
    hung = Goodbye("training hangs", 0.0)
    assert one.left("alice", "bye", 10.0, hung) == Wait(2.0, "training hangs")
    assert one.left("alice", "bye", 10.1, hung) is None
    assert one.take_due(12.0) == ["alice"]
    assert (one.take_due(1e6), one.next_due()) == ([], None), "once"


def test_goodbyes_in_a_row_wait_longer_and_use_the_budget_up():
    """On some machines training hangs at once, every time."""
    one, hung = made(), Goodbye("training hangs", 0.0)
    for now, decided in (
        (10.0, Wait(2.0, "training hangs")),
        (40.0, Wait(4.0, "training hangs")),
        (70.0, End("gave up after 2 relaunches in a row")),
    ):
        one.seen("alice", now - 5.0)
        assert one.left("alice", "bye", now, hung) == decided
        one.take_due(now + 20.0)


def test_a_launch_waits_for_the_end_of_the_machine():
    """Before its end a spot instance would start the client again; the wait has an upper limit."""
    one = made()
    one.seen("alice", 0.0)
    decided = one.left("alice", "bye", 10.0, Goodbye("EC2 spot (terminate)", 100.0))
    assert decided == Wait(102.0, "EC2 spot (terminate)")
    assert one.take_due(111.9) == []
    one.seen("bob", 0.0)
    assert one.left("bob", "bye", 10.0, Goodbye("liar", 9999.0)).seconds == 602.0


def test_a_job_that_waited_long_and_dies_at_once_is_not_healthy():
    """Time in a queue is no healthy time: otherwise the wait would never grow."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.take_due(12.0)
    one.seen("alice", 3600.0)
    assert one.left("alice", "expired", 3605.0) == Wait(4.0)
    one.take_due(3609.0)
    one.seen("alice", 3610.0)
    one.seen("alice", 3665.0)  # a session of the same process
    assert one.left("alice", "expired", 3671.0) == Wait(2.0)


def test_a_restarted_parameter_server_launches_missing_clients():
    """They died while no parameter server ran; those that run join within a session's time."""
    one = made()
    decided = one.recovered(["amy", "bob", "carol"], 20.0, 100.0)
    assert decided == {"amy": Wait(22.0), "bob": Wait(22.0)}
    one.seen("bob", 121.0)
    assert one.take_due(121.9) == []
    assert one.take_due(122.0) == ["amy"]
    assert (one.take_due(1e6), one.next_due()) == ([], None)
    assert one.failed("amy", 130.0) == Wait(4.0), "of the same budget"


def test_members_are_clients_that_did_not_end_for_good():
    """The next parameter server gets those that died, were replaced, or requested a launch."""
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


def test_a_client_that_joins_again_by_itself_is_not_launched():
    """Its connection was down for half a minute, or its site's supervisor was faster."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.seen("alice", 11.0)
    assert one.take_due(100.0) == []


def test_a_failed_launch_is_repeated_within_the_budget():
    """A wrong command must not be run for ever."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.take_due(12.0)
    assert one.failed("alice", 12.0) == Wait(4.0)
    assert one.take_due(16.0) == ["alice"]
    assert one.failed("alice", 16.0) == End("gave up after 2 relaunches in a row")
    assert one.next_due() is None
    one.seen("alice", 20.0)  # it was started by hand
    assert one.left("alice", "expired", 30.0) == Wait(2.0)


def test_deaths_in_a_row_wait_longer_until_a_healthy_minute():
    """A client that dies at once must not be launched every two seconds."""
    one = made()
    one.seen("alice", 0.0)
    one.left("alice", "expired", 10.0)
    one.take_due(12.0)
    one.seen("alice", 14.0)
    assert one.left("alice", "expired", 20.0) == Wait(4.0)
    one.take_due(24.0)
    one.seen("alice", 25.0)
    assert one.left("alice", "expired", 90.0) == Wait(2.0)


def test_an_exit_that_is_seen_is_acted_on_at_once_and_once():
    """The old session expires while the next process starts: that must not end the next one."""
    machine = made()
    machine.seen("alice", 0.0)
    assert machine.exited("alice", -9, 100.0) == Wait(2.0)
    assert machine.take_due(102.0) == ["alice"]
    assert machine.left("alice", "expired", 103.0) is None
    assert machine.next_due() is None
    machine.seen("alice", 105.0)
    assert machine.left("alice", "expired", 300.0) == Wait(2.0)


def test_a_child_that_dies_of_one_error_is_launched_with_a_word_about_it():
    """The operator reads the parameter server's lines, not a file of each child."""
    machine, whys = made(), []
    for now in (0.0, 100.0, 200.0):
        machine.seen("alice", now)
        whys.append(machine.exited("alice", 1, now + 90.0, "no disk").why)
        machine.take_due(now + 95.0)
    assert whys == ["", "", "it ended 3 times in a row with: no disk"]
    machine.seen("alice", 300.0)
    decided = machine.exited("alice", 64, 390.0, "no disk")
    assert decided.why == "", "preemptions are no failures"


def test_the_end_of_a_replaced_child_is_not_that_of_its_replacement():
    """When alice is started elsewhere, the local child is refused and ends; the other counts."""
    machine = made()
    machine.seen("alice", 0.0)
    assert machine.left("alice", "superseded", 100.0) is None
    machine.seen("alice", 100.0)
    assert machine.exited("alice", 2, 101.0) is None
    assert machine.members == {"alice"}
    assert machine.left("alice", "expired", 200.0) == Wait(2.0)
    machine.take_due(202.0)
    machine.seen("alice", 203.0)
    assert machine.exited("alice", 2, 204.0) == End("bad input")


def test_exit_codes_decide_after_an_expired_session():
    """A preempted client must be launched again; one that is done or had bad input must not."""
    machine = made()
    machine.seen("alice", 0.0)
    assert machine.left("alice", "bye", 50.0) is None
    assert machine.exited("alice", 64, 51.0) == Wait(2.0)
    machine.seen("bob", 0.0)
    machine.left("bob", "bye", 50.0)
    assert machine.exited("bob", 0, 51.0) is None
    machine.seen("amy", 0.0)
    assert machine.exited("amy", 2, 51.0) == End("bad input")
    assert machine.exited("nobody", -9, 51.0) is None
