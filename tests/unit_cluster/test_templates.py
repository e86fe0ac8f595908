"""The templates for Slurm and systemd: the script runs with a stand-in client, the unit is read."""

import configparser
import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from fsl_async.errors import ExitCode

BIN = Path(__file__).parents[2] / "bin"

CLIENT = """#!/bin/sh
echo "$@" > arguments
trap 'echo usr2 >> signals; exit 64' USR2
trap 'echo term >> signals; exit 64' TERM
[ -e unresponsive ] && { trap - USR2 TERM; touch ready; exec sleep 30; }
[ -e code ] && exit "$(cat code)"
touch ready
n=0; while [ $n -lt 600 ]; do sleep 0.05; n=$((n+1)); done
"""

SCONTROL = """#!/bin/sh
case "$*" in *show*) exit 1 ;; esac
echo "$@" > requeued
"""


@pytest.fixture
def home(tmp_path):
    """A folder with the template, a stand-in for fsl-node, and one for scontrol."""
    (tmp_path / "bin").mkdir()
    shutil.copy(BIN / "fsl-node.sbatch", tmp_path / "bin")
    for name, body in (("bin/fsl-node", CLIENT), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(body)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def wait_until(condition):
    give_up_at = time.monotonic() + 20.0
    while not condition() and time.monotonic() < give_up_at:
        time.sleep(0.02)


def start(home, stderr=None, **more):
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FSL_"))},
        "PATH": f"{home}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(home),
        "SLURM_JOB_ID": "17",
        "FSL_SERVER": "fsl://h:7100",
        "SLURM_JOB_NAME": "fsl-site-a",
        **more,
    }
    argv = ["bash", home / "bin" / "fsl-node.sbatch", "--task", "t.py:train"]
    return subprocess.Popen(
        argv, env=environment, cwd="/", stderr=stderr, text=True, start_new_session=True,
        # Ignored in programs started with `&`, which would reach the script.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_reaches_the_client_and_the_job_is_requeued(home, number):
    """Slurm signals the script alone, and a plain shell would die or wait for the client."""
    job = start(home)
    wait_until((home / "ready").exists)
    job.send_signal(number)
    assert job.wait(20) == ExitCode.RELAUNCH
    assert (home / "signals").read_text().split() == [number.name.removeprefix("SIG").lower()]
    assert (home / "requeued").read_text() == "requeue 17\n"
    arguments = (home / "arguments").read_text()
    assert arguments == "--role client --name site-a --task t.py:train fsl://h:7100\n"


@pytest.mark.parametrize("number", ["USR2", "TERM"])
@pytest.mark.parametrize("command", ["cd ", "client=$", "before=", "wait"])
def test_a_signal_before_the_client_is_ready_requeues_the_job(home, number, command):
    """Such a signal once ended the shell, or looped in it until the job's time limit."""
    action = f"trap - DEBUG; kill -{number} $$"
    (home / "debug").write_text(
        f"trap 'case $BASH_COMMAND in \"{command}\"*) {action} ;; esac' DEBUG\n"
    )
    job = start(home, BASH_ENV=str(home / "debug"))
    try:
        assert job.wait(20) == ExitCode.RELAUNCH
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert (home / "requeued").read_text() == "requeue 17\n"
    signals = home / "signals"
    assert not signals.exists() or signals.read_text().split() == [number.lower()], "once"


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM])
def test_a_client_that_dies_of_the_signal_is_requeued(home, number):
    """Until Python runs a client has no signal handler: the job once ended with 140 for good."""
    (home / "unresponsive").touch()
    job = start(home)
    wait_until((home / "ready").exists)
    time.sleep(0.1)
    job.send_signal(number)
    assert job.wait(20) == ExitCode.RELAUNCH
    assert (home / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize(
    "given",
    [{"SLURM_JOB_NAME": "give-job-name"}, {"SLURM_JOB_NAME": "fsl-"}, {"SLURM_ARRAY_TASK_ID": "1"}],
)
def test_a_job_without_a_clients_name_ends_before_it_starts(home, given):
    """A launcher could not find it and would submit another job of the same client."""
    assert start(home, **given).wait(20) == ExitCode.BAD_INPUT
    assert not (home / "arguments").exists()


@pytest.mark.parametrize(
    ("refusal", "state", "again"),
    [
        ("Job is pending execution for job 17", "RUNNING", False),
        ("Invalid job id specified", "PENDING Reason=BeginTime", False),
        ("Transition", "COMPLETING Reason=None EndTime=Unknown ", False),
        ("Job is no longer pending or running", "COMPLETED", True),
        ("Requested operation is presently disabled", "RUNNING", True),
    ],
)
def test_a_job_that_slurm_has_requeued_needs_no_new_one(home, refusal, state, again):
    """Slurm may requeue a preempted job itself; a second job would replace its client."""
    (home / "code").write_text(str(int(ExitCode.RELAUNCH)))
    (home / "scontrol").write_text(
        f'#!/bin/sh\ncase "$*" in *show*) echo "   JobState={state}"; exit ;; esac\n'
        f"echo '{refusal}' >&2; exit 1\n"
    )
    job = start(home, stderr=subprocess.PIPE)
    _, message = job.communicate(timeout=20)
    assert job.returncode == ExitCode.RELAUNCH
    assert ("submit it again" in message) == again
    assert (refusal in message) == again
    assert ("Slurm has requeued this job" in message) != again


# As Slurm 22.05 prints it: seen by scripts that had got SIGTERM.
CANCELLED = "COMPLETING Reason=None Restarts=0 EndTime=2026-11-27T03:33:36 PreemptTime=None "
OUT_OF_TIME = CANCELLED.replace("Reason=None", "Reason=TimeLimit")
PREEMPTED = CANCELLED.replace("PreemptTime=None", "PreemptTime=2026-11-27T03:33:46")


@pytest.mark.parametrize(
    ("state", "requeued"),
    [(CANCELLED, False), (OUT_OF_TIME, True), (PREEMPTED, True), ("RUNNING Reason=None ", True)],
)
def test_a_cancelled_job_does_not_come_back(home, state, requeued):
    """Slurm requeues a job that it is cancelling: `scancel` once made it start again."""
    (home / "code").write_text(str(int(ExitCode.RELAUNCH)))
    (home / "scontrol").write_text(
        f'#!/bin/sh\ncase "$*" in *show*) echo "JobId=17 JobState={state}"; exit ;; esac\n'
        'echo "$@" > requeued\n'
    )
    job = start(home, stderr=subprocess.PIPE)
    _, message = job.communicate(timeout=20)
    assert job.returncode == ExitCode.RELAUNCH
    assert (home / "requeued").exists() == requeued
    assert ("cancelled" in message) != requeued


def test_ctrl_c_of_a_job_ends_its_client_for_good(home):
    """`scancel --signal=INT --batch` once ended the script and left its client without one."""
    (home / "bin" / "fsl-node").write_text(
        "#!/bin/bash\ntrap 'echo int >> signals; exit 130' INT; touch ready\n"
        "n=0; while [ $n -lt 400 ]; do sleep 0.05; n=$((n+1)); done\n"
    )
    job = start(home)
    wait_until((home / "ready").exists)
    job.send_signal(signal.SIGINT)
    assert job.wait(20) == ExitCode.INTERRUPTED
    assert (home / "signals").read_text() == "int\n"
    assert not (home / "requeued").exists()


def test_signals_to_the_whole_job_leave_the_script_waiting_for_its_client(home):
    """The script's helper processes die of them, but it must wait for its client."""
    # The first one lasts until it is killed; the client may die a moment after it.
    (home / "sleep").write_text(
        '#!/bin/sh\n[ -e "$HOME_OF_TEST/slept" ] && exec /bin/sleep 0.02\n'
        'touch "$HOME_OF_TEST/slept"; exec /bin/sleep 30\n'
    )
    (home / "sleep").chmod(0o755)
    (home / "rm").write_text('#!/bin/sh\n/bin/sleep 1; exec /bin/rm "$@"\n')
    (home / "rm").chmod(0o755)
    (home / "bin" / "fsl-node").write_text(
        "#!/bin/sh\ntouch started; trap 'echo term >> signals; exit 64' TERM\n"
        "n=0; while [ $n -lt 100 ]; do /bin/sleep 0.05; n=$((n+1)); done; exit 3\n"
    )
    job = start(home, HOME_OF_TEST=str(home))
    wait_until((home / "slept").exists)
    os.killpg(job.pid, signal.SIGTERM)
    assert job.wait(20) == ExitCode.RELAUNCH
    assert (home / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize("code", [0, 2, 1])
def test_other_exit_codes_are_not_requeued(home, code):
    """A finished run or a wrong option must not be requeued forever."""
    (home / "code").write_text(str(code))
    assert start(home).wait(20) == code
    assert not (home / "requeued").exists()


def test_the_unit_restarts_by_exit_code_and_waits_for_the_grace():
    """Restarts must follow the documented exit codes, and KILL must come after --grace."""
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    unit.read(BIN / "fsl-node.service")
    service = unit["Service"]
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"].split() == [
        str(int(ExitCode.BAD_INPUT)),
        str(int(ExitCode.INTERRUPTED)),
    ]
    grace = float(service["ExecStart"].split("--grace ")[1].split()[0])
    assert grace < float(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed"


def test_systemd_takes_the_unit_without_a_word(tmp_path):
    """A misspelled directive only costs a line in the log, and the unit does something else."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    program = tmp_path / "fsl-async" / "bin" / "fsl-node"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (BIN / "fsl-node.service").read_text().replace("%h/", f"{tmp_path}/")
    (tmp_path / "fsl-node@.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "--user", "verify", tmp_path / "fsl-node@.service"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
