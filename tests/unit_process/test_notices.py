"""Notices of signals, Slurm and EC2, without signals, jobs or instances."""

import pytest

from fsl_async.process.notices import (
    Notice,
    SlurmJob,
    of_instance_action,
    of_signal,
    seconds_to_job_notice,
    slurm_job,
)

NOW = 1_700_000_000.0


@pytest.mark.parametrize(
    ("name", "job", "grace_s", "left_s"),
    [
        ("SIGTERM", None, None, None),
        ("SIGTERM", None, 90.0, 90.0),
        ("SIGTERM", SlurmJob("7"), None, 30.0),
        ("SIGTERM", SlurmJob("7"), 45.0, 45.0),
        ("SIGUSR2", None, None, 120.0),
        ("SIGUSR2", SlurmJob("7", NOW + 170.0), None, 120.0),
        ("SIGUSR2", SlurmJob("7", NOW + 61.0), None, 61.0),
        ("SIGUSR2", SlurmJob("7", NOW - 5.0), None, 120.0),
    ],
)
def test_signals(name, job, grace_s, left_s):
    """Slurm's early USR2, its KillWait, a site's --grace, and at most the job's end."""
    assert of_signal(name, job, grace_s, NOW) == Notice(name, left_s)


def test_a_slurm_job_is_read_from_its_variables():
    """Invalid values are ignored: a launcher's mistake must not end a client."""
    assert slurm_job({}) is None
    assert slurm_job({"SLURM_JOB_END_TIME": "5"}) is None
    whole = {"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "1700000600", "SLURM_RESTART_COUNT": "2"}
    job = slurm_job(whole)
    assert job == SlurmJob("42", 1_700_000_600.0, 2)
    assert job.words == "Slurm job 42, requeued 2 times"
    junk = {"SLURM_JOB_ID": "42", "SLURM_JOB_END_TIME": "N/A", "SLURM_RESTART_COUNT": "-1"}
    assert slurm_job(junk) == SlurmJob("42")


def test_the_end_of_a_job_is_notified_two_minutes_before():
    """Also in a job without a signal; at once if that is past, never if the end is unknown."""
    job = SlurmJob("7", NOW + 600.0)
    assert seconds_to_job_notice(job, None, NOW) == 480.0
    assert seconds_to_job_notice(job, 30.0, NOW) == 570.0
    assert seconds_to_job_notice(job, None, NOW + 590.0) == 0.0
    assert seconds_to_job_notice(SlurmJob("7"), None, NOW) is None
    assert seconds_to_job_notice(None, None, NOW) is None


@pytest.mark.parametrize(
    ("body", "notice"),
    [
        (b'{"action":"terminate","time":"2023-11-14T22:15:20Z"}', ("EC2 spot (terminate)", 120.0)),
        (b'{"action":"stop","time":"2023-11-14T22:15:20"}', ("EC2 spot (stop)", 120.0)),
        (b'{"action":"stop","time":"2023-11-14T22:00:00Z"}', ("EC2 spot (stop)", 0.0)),
        (b'{"action":"hibernate","time":"soon"}', ("EC2 spot (hibernate)", None)),
        (b'{"action":"dance","time":"2023-11-14T22:15:20Z"}', None),
        (b"[]", None),
        (b"<html>", None),
        (b"[" * 4000, None),
    ],
)
def test_instance_actions(body, notice):
    """Times are UTC, with or without the Z; any other answer is no announcement."""
    assert of_instance_action(body, NOW) == (notice and Notice(*notice))
