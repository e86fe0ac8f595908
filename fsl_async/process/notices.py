"""Notices that this process will end: signals, Slurm and spot markets as one kind of notice. Pure;
times are arguments.

    source                 deadline
    SIGTERM, SIGUSR2       --grace after it; in a Slurm job 30 s (its KillWait) and 120 s (the
                           template's --signal=USR2@120), and never after the job's end; elsewhere
                           120 s after SIGUSR2, unknown after SIGTERM
    Slurm's time limit     SLURM_JOB_END_TIME; noticed `LEAD_S` before it, for jobs that ask for no
                           signal
    EC2 spot               "time" of spot/instance-action, two minutes ahead at best

NCCL uses SIGUSR1, so that signal has no meaning here. Slurm may send its signal a minute earlier
than asked; the job's end time is exact.
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Mapping

from attrs import frozen

LEAD_S = 120.0
"""So long before a Slurm job's end it is told, unless --grace says otherwise."""

KILL_WAIT_S = 30.0
"""From Slurm's SIGTERM to its SIGKILL, unless the site has changed it."""

_MOST_BODY = 4096


@frozen
class Notice:
    """This process will be ended in `left_s` seconds (None: nobody said when), for `source`."""

    source: str
    left_s: float | None = None


@frozen
class SlurmJob:
    """The Slurm job that this process is part of. end_s: seconds since 1970, None where Slurm is
    too old to say.
    """

    job: str
    end_s: float | None = None
    restarts: int = 0
    """How often it was requeued."""

    @property
    def words(self) -> str:
        """For people."""
        times = {0: "", 1: ", requeued once"}.get(
            self.restarts, f", requeued {self.restarts} times"
        )
        return f"Slurm job {self.job}{times}"


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """Read Slurm's variables; None outside of a job. What is not a number counts as not said."""
    job = environment.get("SLURM_JOB_ID", "")
    if not job:
        return None
    end = environment.get("SLURM_JOB_END_TIME", "")
    restarts = environment.get("SLURM_RESTART_COUNT", "")
    return SlurmJob(
        job[:40],
        float(end) if _is_count(end) else None,
        int(restarts) if _is_count(restarts) else 0,
    )


def of_signal(name: str, job: SlurmJob | None, grace_s: float | None, now_s: float) -> Notice:
    """What a SIGTERM or SIGUSR2 at `now_s` (seconds since 1970) means."""
    left_s = grace_s
    if left_s is None and name == "SIGUSR2":
        left_s = LEAD_S
    elif left_s is None and job is not None:
        left_s = KILL_WAIT_S
    if left_s is not None and job is not None and job.end_s is not None and job.end_s > now_s:
        left_s = min(left_s, job.end_s - now_s)
    return Notice(name, left_s)


def seconds_to_job_notice(
    job: SlurmJob | None, grace_s: float | None, now_s: float
) -> float | None:
    """How long to wait before telling of the job's time limit; None when nobody knows it."""
    if job is None or job.end_s is None:
        return None
    return max(0.0, job.end_s - (LEAD_S if grace_s is None else grace_s) - now_s)


def of_instance_action(body: bytes, now_s: float) -> Notice | None:
    """Read what EC2 answers under spot/instance-action; None when that is not an announcement of an
    end.

    Format: {"action": "terminate" | "stop" | "hibernate", "time": "2017-09-18T08:22:00Z"}; Amazon
    EC2 User Guide, "Spot Instance interruption notices". A time that cannot be read is as good as
    none: the notice counts, without a deadline.
    """
    try:
        found = json.loads(body[:_MOST_BODY])
    except (ValueError, RecursionError):
        return None
    actions = ("terminate", "stop", "hibernate")  # a tuple: what is looked for may be unhashable
    if not isinstance(found, dict) or found.get("action") not in actions:
        return None
    source = f"EC2 spot ({found['action']})"
    try:
        when = dt.datetime.fromisoformat(str(found.get("time")))
    except ValueError:
        return Notice(source)
    if when.tzinfo is None:
        when = when.replace(tzinfo=dt.UTC)
    return Notice(source, max(0.0, when.timestamp() - now_s))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 12
