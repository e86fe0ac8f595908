"""Nodes that start in milliseconds: processes forked from one that has imported torch and
fsl_async.

Importing torch costs three seconds of a core for each process, most of the time of tests with
processes. A forked process has its own memory, sockets, disk and exit, is killed like any other,
and runs `fsl_async.cli.main` from its first line. The start of the interpreter is not tested: tests
of commands as users type them start their processes by `subprocess`.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

NODES = ("client.joining", "ps.node", "relay.relay", "split_server.node")
"""Modules of `fsl_async.nodes` that commands import when they need them."""
MESSAGE_BYTES = 1 << 17
NETWORK = 0x40000000
"""CLONE_NEWNET of setns(2), which `os` has from Python 3.12 on."""


class WarmProcess:
    """The part of `subprocess.Popen` that the tests use."""

    def __init__(self, starter, pid):
        self.pid = pid
        self.stdout = None
        self.returncode = None
        self._starter = starter
        self._pidfd = os.pidfd_open(pid)

    def poll(self):
        """Return the exit code, or None while it runs."""
        return self._ended(0.0)

    def wait(self, timeout=None):
        """Wait for the end; returns the exit code, negative for a signal."""
        code = self._ended(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def _ended(self, timeout):
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            # It is not reaped until this is answered, so its pid is not reused.
            self.returncode = self._starter.ask({"reap": self.pid})["code"]
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number):
        """Send a signal, if the process has not ended."""
        if self.poll() is None:
            signal.pidfd_send_signal(self._pidfd, number)

    def kill(self):
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class WarmStarter:
    """Starts nodes. `close` ends the starter; running nodes go on."""

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
        """Start `fsl-node ARGUMENTS` in a folder and, if named, in a network namespace.

        Its standard output and error come as text in `stdout`.
        """
        read, write = os.pipe()
        try:
            started = self.start_into(write, arguments, cwd, inside)
        finally:
            os.close(write)
        started.stdout = os.fdopen(read, encoding="utf-8")
        return started

    def start_into(self, descriptor, arguments, cwd, inside=""):
        """As `start`, with its output into an open file."""
        given = {"start": [str(each) for each in arguments], "cwd": str(cwd), "inside": inside}
        return WarmProcess(self, self.ask(given, [descriptor])["pid"])

    def ask(self, question, descriptors=()):
        """Send a request, return the answer."""
        with self._lock:
            socket.send_fds(self._mine, [json.dumps(question).encode()], list(descriptors))
            return json.loads(self._mine.recv(MESSAGE_BYTES))

    def close(self):
        """Kill the starter: Python's exit would only take time."""
        self._mine.close()
        self._process.kill()
        self._process.wait()


def serve(line):
    """Answer requests until the other end closes.

    Returns None at the end; in a forked process it returns the request to run.
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
    """Enter a network namespace made by `ip netns`."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", namespace).open() as place:
        if libc.setns(place.fileno(), NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def run():
    """Run the starter's process, and in forked processes the node."""
    line = socket.socket(fileno=int(sys.argv[1]))
    del sys.path[0]  # this folder, which no node has on its path
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at the tests does not end it
    import torch

    from fsl_async import cli

    for name in NODES:
        importlib.import_module(f"fsl_async.nodes.{name}")
    # The first optimizer imports modules for a second. It starts no thread; nothing here may,
    # before a fork.
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)]).zero_grad()
    # A garbage collection in a forked process would write to all these pages: a second of a core.
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
    code = cli.main()
    # As Python ends, but it does not free all that the starter has imported.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(run())
