"""Runs `ip`, `tc` and other programs on this machine, all with a time limit; decides nothing."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fsl_async.errors import FslError
from netlab.plan import Site

LIMIT_S = 20.0
SETUP = "bin/netlab-setup"
_NAMESPACES = Path("/run/netns")


class LabError(FslError):
    """The laboratory cannot be had or changed; the message says what to do. Exit code 2."""


class MissingError(LabError):
    """This machine lacks something that a laboratory needs: a test skips with this message."""


def program(name: str) -> str:
    """Path of a program; raises MissingError."""
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if found is None:
        raise MissingError(f"{name} is not installed; run {SETUP}")
    return found


def run(
    argv: Sequence[str],
    *,
    text: str | None = None,
    limit_s: float = LIMIT_S,
    check: bool = True,
    files: Sequence[int] = (),
) -> str:
    """Run a program to its end and return its output; raises LabError with what it printed.

    `files` stay open in it.
    """
    try:
        done = subprocess.run(
            [program(argv[0]), *argv[1:]],
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            pass_fds=files,
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"{' '.join(argv)[:200]} did not end within {limit_s:g} s") from None
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise LabError(f"{' '.join(argv)[:200]}: {said[:400]}")
    return done.stdout


def ip_batch(lines: Iterable[str], namespace: str = "") -> None:
    """Carry out lines of `ip`, in a namespace or here."""
    where = ["-netns", namespace] if namespace else []
    run(["ip", *where, "-batch", "-"], text="\n".join(lines) + "\n")


ASK_AGAIN = "route flush cache"
"""A line for `ip_batch`: connections that exist look up their route, and with it the properties of
its device, again."""

_SIOCETHTOOL = 0x8946
_ETHTOOL_STSO = 0x1F


def set_whole(namespace: str, device: str, *, whole: bool) -> None:
    """Let a device in a namespace take up to 64 KB of a TCP stream at once (TSO), or not.

    Not: single packets only (ethtool -K DEVICE tso off). netem loses, doubles or moves what it gets
    at once, and no network does that to 64 KB.
    """

    def switch() -> None:
        value = ctypes.create_string_buffer(struct.pack("II", _ETHTOOL_STSO, int(whole)))
        request = struct.pack("16sP16x", device.encode(), ctypes.addressof(value))
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)

    _in_namespace(namespace, switch)
    ip_batch([ASK_AGAIN], namespace)


def _set_namespace(namespace: str) -> None:
    with (_NAMESPACES / namespace).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _in_namespace(namespace: str, action: Callable[[], None]) -> None:
    """Carry out something in a namespace; raises LabError.

    In a thread of its own, because setns(2) is for a thread.
    """
    failed: list[OSError] = []

    def enter_and_act() -> None:
        try:
            _set_namespace(namespace)
            action()
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=enter_and_act, name=f"in {namespace}")
    thread.start()
    thread.join()
    if failed:
        raise LabError(f"{namespace}: {failed[0].strerror}")


def enter(namespace: str) -> tuple[str, ...]:
    """Words to put before a command so that it runs in a namespace."""
    return (program("ip"), "netns", "exec", namespace)


_CONGESTION = Path("/proc/sys/net/ipv4")


def allow_congestion(name: str) -> None:
    """Let namespaces use a congestion control that the kernel has.

    Only those that unprivileged processes may choose can be a namespace's default, so this adds it
    to that list, which is the whole machine's and stays. Raises LabError with those that there are.
    """
    there = (_CONGESTION / "tcp_available_congestion_control").read_text("utf-8").split()
    if name not in there:
        raise LabError(
            f"this kernel has no congestion control {name[:40]!r}, only {', '.join(there)}"
        )
    allowed = _CONGESTION / "tcp_allowed_congestion_control"
    names = allowed.read_text("utf-8").split()
    if name not in names:
        allowed.write_text(" ".join([*names, name]), "utf-8")


def write_settings(site: Site, settings: Mapping[str, str]) -> None:
    """Write files below /proc/sys/net in a namespace; those that the kernel lacks are left out."""
    script = "cd /proc/sys/net" + "".join(
        f"; [ ! -e {name} ] || echo {value} >{name} || echo {name}={value}"
        for name, value in settings.items()
    )
    refused = run([*enter(site.namespace), "sh", "-c", script])
    if refused:
        raise LabError(f"{site.name}: the kernel refuses {refused.strip()[:200]}")


def namespaces() -> list[str]:
    """Names of the network namespaces that there are."""
    return [line.split()[0] for line in run(["ip", "netns", "list"]).splitlines() if line.strip()]


def has_netem() -> bool:
    """Whether the kernel has sch_netem: tried in a namespace that ends with the try."""
    words = "tc qdisc add dev lo root netem delay 1ms"
    argv = ["unshare", "--net", "sh", "-c", f"PATH=$PATH:/usr/sbin:/sbin {words}"]
    with contextlib.suppress(LabError):
        run(argv)
        return True
    return False


def require() -> None:
    """Raise MissingError when no kind of laboratory can be had here."""
    if sys.platform != "linux":
        raise MissingError("a laboratory needs Linux (network namespaces); use a virtual machine")
    if os.geteuid() != 0:
        raise MissingError("a laboratory needs root (network namespaces); run this with sudo")
    for name in ("ip", "tc"):
        program(name)


# --- processes ---


def started(pid: int) -> int:
    """Return when a process started, in the kernel's ticks; 0 when it is gone.

    Its id and start together identify a process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return 0
    state, *rest = text.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(rest[18])


def is_running(pid: int, start: int) -> bool:
    """Whether exactly this process still runs."""
    return start != 0 and started(pid) == start


def end_processes(pids: Iterable[int], *, grace_s: float = 2.0) -> None:
    """TERM, and KILL to those that are there after `grace_s`."""
    left = {pid: started(pid) for pid in pids}
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for pid, start in left.items():
            if is_running(pid, start):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while left and time.monotonic() < deadline:
            left = {pid: start for pid, start in left.items() if is_running(pid, start)}
            if left:
                time.sleep(0.02)


def processes_with(word: str) -> list[int]:
    """Processes that have a word on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if word.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def is_in(pid: int, namespace: str) -> bool:
    """Whether this namespace is the network of a process."""
    try:
        return Path(f"/proc/{pid}/ns/net").samefile(_NAMESPACES / namespace)
    except OSError:
        return False


def processes_in(namespace: str) -> list[int]:
    """Processes whose network is this namespace."""
    found = run(["ip", "netns", "pids", namespace], check=False)
    return [int(word) for word in re.findall(r"\d+", found)]


def delete_namespace(namespace: str) -> None:
    """End what runs in a namespace and delete it."""
    end_processes(pid for pid in processes_in(namespace) if pid != os.getpid())
    run(["ip", "netns", "delete", namespace], check=False)
