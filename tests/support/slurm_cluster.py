"""A real Slurm on this machine: munged, slurmctld and one slurmd for each node, in one folder.

As root and without systemd; everything listens on loopback. Nodes have the processors that they
claim (`config_overrides`), so jobs of several tests run side by side.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ports import free_ports

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")
NODES = ("one", "two", "three", "four")
"""Of one processor each: one job fills a node."""
REQUEUE_DELAY_S = 5
"""Seconds until a requeued job may start: Slurm waits as long as a job's credential lasts (120 s
unless it is set)."""

_CONF = """\
ClusterName=scratch
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue_delay_s}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MpiDefault=none
KillWait=20
SlurmdTimeout=4
MessageTimeout=3
TCPTimeout=1
MinJobAge=600
{more}
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 \
PreemptMode=REQUEUE GraceTime={grace_s} OverSubscribe=NO
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10
"""


def missing():
    """Return why there can be no Slurm here; empty when there can be one."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root here"
    absent = [name for name in PROGRAMS if shutil.which(name, path=search_path()) is None]
    return f"{', '.join(absent)}: not installed; run bin/slurm-setup" if absent else ""


def search_path():
    """Return PATH with the folders of daemons."""
    return f"{os.environ['PATH']}:/usr/sbin:/sbin"


class Cluster:
    """Use as a context manager. Jobs run as root.

    requeue_delay_s: until a requeued job may start. grace_s: GraceTime of preempted jobs. more:
    lines of slurm.conf.
    """

    def __init__(self, folder, *, requeue_delay_s=REQUEUE_DELAY_S, grace_s=0, more=""):
        self.folder = folder
        self._settings = {"requeue_delay_s": requeue_delay_s, "grace_s": grace_s, "more": more}
        self.conf = folder / "slurm.conf"
        self.environment = {**os.environ, "PATH": search_path(), "SLURM_CONF": str(self.conf)}
        self._daemons = {}

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_):
        self.close()

    def _start(self):
        self.folder.chmod(0o755)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        port, *ports = free_ports(1 + len(NODES))
        nodes = "\n".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={at}"
            " CPUs=1 RealMemory=500 State=UNKNOWN"
            for node, at in zip(NODES, ports, strict=True)
        )
        host = socket.gethostname()
        self.conf.write_text(
            _CONF.format(folder=self.folder, host=host, port=port, nodes=nodes, **self._settings)
        )
        files = {name: self.folder / f"munge.{name}" for name in ("log", "pid", "seed", "socket")}
        self._daemon(
            "munged",
            ["munged", "--foreground", "--force", f"--key-file={key}"]
            + [f"--{name}{'-file' if name != 'socket' else ''}={at}" for name, at in files.items()],
        )
        self.wait_until(files["socket"].exists, "munge's socket")
        self._daemon("slurmctld", ["slurmctld", "-D", "-f", str(self.conf)])
        for node in NODES:
            self.start_node(node)
        self.wait_until(self.is_up, "all nodes idle")

    def start_node(self, node):
        """Start the slurmd of a node."""
        self._daemon(f"slurmd-{node}", ["slurmd", "-D", "-N", node, "-f", str(self.conf)])

    def kill_node(self, node):
        """SIGKILL the slurmd of a node; its jobs' processes go on."""
        daemon = self._daemons.pop(f"slurmd-{node}")
        daemon.kill()
        daemon.wait()

    def lose_node(self, node):
        """SIGKILL the slurmd of a node and all that it has started, as when its power fails."""
        jobs = self._processes_on(node)
        self.kill_node(node)
        # Stopped first: a slurmstepd that sees its script die reports a failed job.
        for one in (signal.SIGSTOP, signal.SIGKILL):
            for pid in jobs:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, one)

    def _processes_on(self, node):
        """Return the processes of this cluster's jobs on a node, and the slurmstepd of each."""
        found = self._processes(f"SLURMD_NODENAME={node}")
        for pid in tuple(found):
            with contextlib.suppress(OSError):
                parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
                if Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
                    found.add(int(parent))
        return found

    def _processes(self, *more):
        """Return the processes that began with this cluster's SLURM_CONF, and `more` variables."""
        marks = {word.encode() for word in (f"SLURM_CONF={self.conf}", *more)}
        found = set()
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if marks <= set((path / "environ").read_bytes().split(b"\0")):
                    found.add(int(path.name))
        return found - {os.getpid()}

    def _daemon(self, name, words):
        with (self.folder / f"{name}.out").open("w") as out:
            self._daemons[name] = subprocess.Popen(
                words,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def is_up(self):
        """Whether all nodes are idle."""
        states = self.ask("sinfo", "--noheader", "--Node", "--format=%T", check=False).split()
        return bool(states) and set(states) == {"idle"}

    def ask(self, *words, check=True):
        """Run one of Slurm's programs; returns its output."""
        done = subprocess.run(
            list(map(str, words)),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{words} exited with {done.returncode}: {done.stderr}")
        return done.stdout

    def submit(self, *words, **environment):
        """Run sbatch; returns the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", *map(str, words)],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return int(done.stdout.split(";")[0])

    def state(self, job):
        """Return what `scontrol show job` has of a job, by key."""
        words = self.ask("scontrol", "-o", "show", "job", job, check=False).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_state(self, job, *states, seconds=60.0):
        """Wait until a job is in one of `states`; returns all of it."""
        self.wait_until(
            lambda: self.state(job).get("JobState") in states,
            lambda: f"job {job} {' or '.join(states)}, but {self.state(job)}",
            seconds,
        )
        return self.state(job)

    def wait_until(self, condition, what, seconds=60.0):
        """Wait until `condition()` holds; `what`, or what it returns, is in the error."""
        give_up_at = time.monotonic() + seconds
        while time.monotonic() < give_up_at:
            if condition():
                return
            time.sleep(0.1)
        what = what() if callable(what) else what
        logs = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.out"))
        ]
        raise AssertionError(f"{what}: never\n" + "\n".join(logs))

    def jobs(self, name):
        """Return numbers of the jobs of a name that are not over."""
        found = self.ask("squeue", "--noheader", f"--name={name}", "--format=%i")
        return [int(word) for word in found.split()]

    def close(self):
        """End the daemons, then all that they have started."""
        for name in sorted(self._daemons, key=lambda one: one == "munged"):
            self._daemons[name].send_signal(signal.SIGTERM)
        for daemon in self._daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self._daemons.clear()
        # Jobs, and each slurmstepd: it would wait for ever for a slurmctld that has ended.
        for pid in self._processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
