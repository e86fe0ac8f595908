"""Reads signals, Slurm's variables and EC2's answers as notices of preemption. Pure.

    source              deadline
    SIGTERM, SIGUSR2    --grace after it; in a Slurm job 30 s (its KillWait) and 120 s (the
                        template's --signal=USR2@120), at most the job's end; elsewhere unknown for
                        SIGTERM and 120 s for SIGUSR2
    Slurm's time limit  SLURM_JOB_END_TIME; the notice comes `LEAD_S` before it, for jobs that
                        request no signal
    EC2 spot            "time" of spot/instance-action, at most two minutes ahead

SIGUSR1 is left to NCCL. Slurm may send its signal a minute earlier than requested; the job's end
time is exact.
"""

import datetime as dt
import json
from collections.abc import Mapping

from attrs import frozen

LEAD_S = 120.0
"""Seconds from the notice to the end of a Slurm job, unless --grace is given."""

KILL_WAIT_S = 30.0
"""Seconds from Slurm's SIGTERM to its SIGKILL, unless the site has changed them."""

_MOST_BODY = 4096


@frozen
class Notice:
    """This process will be ended in `left_s` seconds (None: unknown) by `source`."""

    source: str
    left_s: float | None = None


@frozen
class SlurmJob:
    """The Slurm job of this process.

    end_s: seconds since 1970; None in old versions of Slurm.
    restarts: how often it was requeued.
    """

    job: str
    end_s: float | None = None
    restarts: int = 0

    @property
    def words(self) -> str:
        """Return the phrase that names the job in messages."""
        times = {0: "", 1: ", requeued once"}.get(
            self.restarts, f", requeued {self.restarts} times"
        )
        return f"Slurm job {self.job}{times}"


def slurm_job(environment: Mapping[str, str]) -> SlurmJob | None:
    """Read Slurm's variables; None outside of a job. Values that are no numbers are ignored."""
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
    """Return the notice of a SIGTERM or SIGUSR2 at `now_s` (seconds since 1970)."""
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
    """Return the time until the notice of the job's time limit; None when that is unknown."""
    if job is None or job.end_s is None:
        return None
    return max(0.0, job.end_s - (LEAD_S if grace_s is None else grace_s) - now_s)


def of_instance_action(body: bytes, now_s: float) -> Notice | None:
    """Read EC2's answer under spot/instance-action; None when it announces no end.

    Format: {"action": "terminate" | "stop" | "hibernate", "time": "2017-09-18T08:22:00Z"}; Amazon
    EC2 User Guide, "Spot Instance interruption notices". If the time cannot be read, the notice has
    no deadline.
    """
    try:
        found = json.loads(body[:_MOST_BODY])
    except (ValueError, RecursionError):
        return None
    # A tuple, because the value may be unhashable.
    actions = ("terminate", "stop", "hibernate")
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
