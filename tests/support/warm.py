"""Nodes that start in milliseconds: processes forked from one that has imported what a node
imports.

Importing torch is three seconds of a core for each process, and most of what tests of processes
wait for. A forked one has its own memory, sockets, disk and exit, is killed like any other, and
runs `fsl_async.cli.main` from the first line. What it does not try is the start of the interpreter:
tests of commands as people type them start their processes the long way.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

MESSAGE_BYTES = 1 << 17
NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2), which `os` has from Python 3.12 on."""


class WarmProcess:
    """As much of a `subprocess.Popen` as the tests use."""

    def __init__(self, starter, pid):
        self.pid = pid
        self.stdout = None
        self.returncode = None
        self._starter = starter
        self._pidfd = os.pidfd_open(pid)

    def poll(self):
        """The exit code, or None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout=None):
        """Wait for the end; returns the exit code, negative for a signal."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def _ended(self, timeout):
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            # Nobody has reaped it until this is answered, so its number is nobody else's.
            self.returncode = self._starter.ask({"reap": self.pid})["code"]
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number):
        """To the process, where it has not ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self):
        """Kill -9."""
        self.send_signal(signal.SIGKILL)


class WarmStarter:
    """Starts nodes. `close` ends it; nodes that run then go on."""

    def __init__(self):
        self._mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with its:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(its.fileno())],
                pass_fds=[its.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
            )

    def start(self, arguments, cwd, inside=""):
        """Start `fsl-node ARGUMENTS` in a folder and, where named, in a network namespace; its
        output, both kinds, comes as text.
        """
        read, write = os.pipe()
        try:
            started = self.start_into(write, arguments, cwd, inside)
        finally:
            os.close(write)
        started.stdout = os.fdopen(read, encoding="utf-8")
        return started

    def start_into(self, descriptor, arguments, cwd, inside=""):
        """The same, with its output into an open file."""
        given = {"start": [str(each) for each in arguments], "cwd": str(cwd), "inside": inside}
        return WarmProcess(self, self.ask(given, [descriptor])["pid"])

    def ask(self, question, descriptors=()):
        """Send a question, return the answer."""
        with self._lock:
            socket.send_fds(self._mine, [json.dumps(question).encode()], list(descriptors))
            return json.loads(self._mine.recv(MESSAGE_BYTES))

    def close(self):
        """End it. What Python does at its end is of no use to anybody."""
        self._mine.close()
        self._process.kill()
        self._process.wait()


def serve(line):
    """Answer until the other end closes. Returns in a forked process only, with what it is to
    run.
    """
    while True:
        try:
            raw, descriptors, _, _ = socket.recv_fds(line, MESSAGE_BYTES, 4)
        except ConnectionResetError:
            return None
        if not raw:
            return None
        question = json.loads(raw)
        if "reap" in question:
            status = os.waitpid(question["reap"], 0)[1]
            answer = {"code": os.waitstatus_to_exitcode(status)}
        else:
            pid = os.fork()
            if not pid:
                line.close()
                os.dup2(descriptors[0], 1)
                os.dup2(descriptors[0], 2)
                os.close(descriptors[0])
                return question
            os.close(descriptors[0])
            answer = {"pid": pid}
        line.send(json.dumps(answer).encode())


def enter(namespace):
    """Go into a network namespace that `ip netns` made."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as place:
        if libc.setns(place.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def run():
    """The starter's own process."""
    line = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # this folder: no node has it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests is not for it
    import torch

    from fsl_async import cli
    from fsl_async.config import settings  # noqa: F401 - to have them imported

    # A first optimiser imports a second of modules; it starts no thread, and neither may anything
    # else here.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).zero_grad()
    # What is here is nobody's garbage: a collection in a forked process, as at its end, would write
    # to every page of it, a second of a core.
    gc.freeze()
    question = serve(line)
    if question is None:
        return 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if question["inside"]:
        enter(question["inside"])
    os.chdir(question["cwd"])
    sys.path.insert(0, question["cwd"])
    sys.argv = [cli.__file__, *question["start"]]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(line_buffering=True)
    return cli.main()


if __name__ == "__main__":
    sys.exit(run())
