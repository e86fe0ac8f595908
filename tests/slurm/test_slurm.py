"""Clients as jobs of a real Slurm: what it does to them, and what that costs in training."""

import asyncio
import json
import time

import pytest
from slurm_cluster import Cluster

from fsl_async.cluster.launchers import LeftAloneError, SlurmLauncher

pytestmark = pytest.mark.slow

KILLED = "no message came from it"


def launchers(training):
    """Write a launch file of jobs like those that the tests submit; returns its path."""
    command = json.dumps([str(word) for word in training.words("--grace=3")])
    path = training.folder / "launchers.toml"
    path.write_text(
        f'first_wait_s = 0.2\n[[launcher]]\nclients = "*"\nkind = "slurm"\ncommand = {command}\n'
    )
    return path


def in_good_order(training, name, job, reason):
    """Check that a client left once, by `reason`, and that nothing told people to submit again."""
    log, told = training.job_log(name, job), training.log.read_text()
    assert log.count(f"{reason}: finishing in good order") == 1
    assert f"stopped: {reason}" in log
    assert "stopping now" not in log
    assert "submit it again" not in log
    assert told.count(f"{name} left: it ended its session") == 1
    assert f"{name} is launched again" not in told


def test_jobs_that_slurm_ends_come_back_once_unless_a_person_cancelled_them(training):
    """Preempted, out of time, cancelled, and on a node that is lost: all at once, for speed."""
    cluster = training.cluster
    training.start("--launchers", launchers(training))
    jobs = {
        "preempted": training.submit("preempted", "--grace=10"),
        "limited": training.submit("limited", "--grace=10", "--time=1", "--signal=B:USR2@50"),
        "cancelled": training.submit("cancelled", "--grace=10"),
        "lost": training.submit("lost"),
    }
    for name, job in jobs.items():
        training.wait_job(name, job, "twenty steps")
    time.sleep(5.0)  # a heartbeat reports them
    on = {name: cluster.state(job)["NodeList"] for name, job in jobs.items()}
    urgent = ("--partition=high", f"--nodelist={on['preempted']}", "--output=/dev/null")
    cluster.submit(*urgent, "--wrap", "sleep 1")
    cluster.ask("scancel", jobs["cancelled"])
    cluster.lose_node(on["lost"])

    training.wait_for(f"cancelled is not launched: its Slurm job {jobs['cancelled']} was cancelled")
    training.wait_job("limited", jobs["limited"], "stopped: SIGUSR2")
    # A busy machine may take a minute to start it again.
    cluster.ask("scontrol", "update", f"JobId={jobs['limited']}", "TimeLimit=30")
    for name in ("preempted", "limited", "lost"):
        training.wait_job(name, jobs[name], "requeued once")
        training.wait_for(f"{name} is back as a new process")
        assert cluster.jobs(f"fsl-{name}") == [jobs[name]], "the same job, and no other"
    in_good_order(training, "preempted", jobs["preempted"], "SIGTERM")
    in_good_order(training, "limited", jobs["limited"], "SIGUSR2")
    in_good_order(training, "cancelled", jobs["cancelled"], "SIGTERM")
    assert cluster.jobs("fsl-cancelled") == []
    training.wait_for(f"lost is not launched: Slurm has job {jobs['lost']} ")

    assert training.ends("preempted") == {"SIGTERM": (1, 0)}
    assert training.ends("limited") == {"SIGUSR2": (1, 0)}
    assert training.ends("cancelled") == {"SIGTERM": (1, 0)}
    ((why, (times, lost)),) = training.ends("lost").items()
    assert (why, times) == (KILLED, 1)
    assert lost >= 160, "no sync was due: all that it had reported"
    for name in ("preempted", "limited", "cancelled"):
        trained = int(training.job_log(name, jobs[name]).split("tokens trained")[1].split()[0])
        assert training.accepted(name) == trained >= 160
    assert f"lost lost at least {lost:,} tokens" in training.status_text()


def test_a_job_that_waits_or_runs_is_not_submitted_a_second_time(training, monkeypatch):
    """Two jobs of one client would replace each other; one that is over must not hinder."""
    cluster = training.cluster
    for key in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(key, cluster.environment[key])
    sleeps = ("--output=/dev/null", "--job-name=fsl-x", "--wrap", "sleep 60")
    launch = ("--output=/dev/null", "--hold", "--wrap", "true")

    async def play():
        launcher = SlurmLauncher()
        job = cluster.submit("--hold", *sleeps)
        with pytest.raises(LeftAloneError, match=f"^Slurm has job {job} PENDING for it$"):
            await launcher.launch("x", launch)
        cluster.ask("scontrol", "release", job)
        cluster.wait_state(job, "RUNNING")
        with pytest.raises(LeftAloneError, match=f"^Slurm has job {job} RUNNING for it$"):
            await launcher.launch("x", launch)
        cluster.ask("scancel", job)
        cluster.wait_state(job, "CANCELLED")
        with pytest.raises(LeftAloneError, match=f"job {job} was cancelled"):
            await launcher.launch("x", launch)
        failed = cluster.submit("--output=/dev/null", "--job-name=fsl-x", "--wrap", "exit 1")
        cluster.wait_state(failed, "FAILED")
        started = await launcher.launch("x", launch)
        assert started.startswith("Slurm job ")
        assert cluster.jobs("fsl-x") == [int(started.split()[-1])]
        await launcher.close()
        assert cluster.jobs("fsl-x") == [], "it had not begun when the run ended"

    asyncio.run(play())


@pytest.mark.sweep
def test_with_slurms_own_times_a_preempted_job_is_back_after_two_minutes(tmp_path, request):
    """GraceTime of 10 s with send_user_signal; a requeued job waits 120 s, as Slurm has it."""
    request.getfixturevalue("cluster")
    (tmp_path / "slurm").mkdir()
    (tmp_path / "training").mkdir()
    more = "SlurmctldParameters=preempt_send_user_signal"
    with Cluster(tmp_path / "slurm", requeue_delay_s=120, grace_s=10, more=more) as cluster:
        training = type(request.getfixturevalue("training"))(tmp_path / "training", cluster)
        try:
            training.start("--launchers", launchers(training))
            job = training.submit("a", "--grace=8")
            training.wait_job("a", job, "twenty steps")
            node = cluster.state(job)["NodeList"]
            begun = time.monotonic()
            urgent = ("--partition=high", f"--nodelist={node}", "--output=/dev/null")
            cluster.submit(*urgent, "--wrap", "sleep 1")
            training.wait_job("a", job, "stopped: SIGUSR2")
            left = time.monotonic()
            training.wait_for("a is back as a new process", seconds=100)
            back = time.monotonic()
        finally:
            training.close()
    times = f"left after {left - begun:.0f} s, back {back - left:.0f} s later"
    print(times)  # noqa: T201
    assert training.ends("a") == {"SIGUSR2": (1, 0)}
    assert 100 < back - left < 200
