"""Backend for kernels without sch_netem: a router VM between the sites, whose kernel has it.

Each link is two network cards of the VM; what comes in at one goes out at the other (tc-mirred(8),
which costs the emulated processor a third less than a bridge), with netem on the egress of both.
The other side of a card is a tap device in the namespace of a site. QEMU runs without KVM (TCG),
because hosts that lack modules are often guests themselves. Commands go over the serial console, a
Unix socket, one at a time. The taps belong to the QEMU process and vanish with it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from netlab import host, image, records
from netlab.host import LabError, MissingError
from netlab.netem import arguments
from netlab.plan import Link, Plan
from netlab.profiles import LinkSettings

CONSOLE = "console.sock"
BOOT_S = 60.0
ANSWER_S = 20.0
MOST_LINKS = 60
_MEMORY_MB = 256
# Without `rep movs` for everything: emulated, it copies byte by byte, and the router forwards a
# third fewer packets.
_PROCESSOR = "max,-erms,-fsrm"
_TUNSETIFF = 0x400454CA
_TAP, _NO_PI, _VNET_HDR = 0x0002, 0x1000, 0x4000
_QEMU = "qemu-system-x86_64"


def require() -> None:
    """Raise MissingError when there can be no router VM here."""
    if os.uname().machine != "x86_64":
        raise MissingError("this kernel has no sch_netem, and the router VM is for x86-64 only")
    host.program(_QEMU)
    if not Path("/dev/net/tun").exists():
        raise MissingError("there is no /dev/net/tun; load the kernel module tun")
    image.build()


class Machine:
    """The router VM of one laboratory, in whose folder are its console and its process id."""

    name = "router VM"

    def __init__(self, lab: Plan) -> None:
        self._plan = lab
        self._folder = records.folder(lab.name)
        self._console = self._folder / CONSOLE

    def build(self, settings: Mapping[str, LinkSettings]) -> int:
        """Start the VM, hand its cards to the sites, join them; returns its process id.

        Raises LabError.
        """
        links = list(self._plan.links.values())
        if len(links) > MOST_LINKS:
            raise LabError(f"a router VM has at most {MOST_LINKS} links, not {len(links)}")
        built = image.build()
        taps = [_open_tap() for _ in range(2 * len(links))]
        try:
            pid = self._start(built, links, [file for file, _ in taps])
            moves = [
                f"link set dev {tap} netns {end.site.namespace} name {end.device}"
                for (_, tap), end in zip(
                    taps, (e for link in links for e in link.ends), strict=True
                )
            ]
            host.ip_batch(moves)
        finally:
            for file, _ in taps:
                os.close(file)
        with Console(self._console) as console:
            console.wait_until_ready(pid)
            for link in links:
                console.command(_join(link))
        for link in links:
            self.apply(link, settings[link.name], cut=False)
        return pid

    def apply(self, link: Link, settings: LinkSettings, *, cut: bool) -> None:
        """Set both directions of a link."""
        for end in link.ends:
            # netem is behind the tap, so it is enough that the stack splits before it; above, a
            # sender works as with any network card.
            host.set_whole(end.site.namespace, end.device, whole=settings.keeps_packets)
        with Console(self._console) as console:
            # What leaves a card goes to the site of that card.
            console.command(
                " && ".join(
                    f"/sbin/tc qdisc replace dev {card} root {' '.join(arguments(way, cut=cut))}"
                    for card, way in zip(_cards(link), (settings.up, settings.down), strict=True)
                )
            )

    def remove(self) -> None:
        """End the VM.

        It is looked for, and not only remembered: the process that made it may have died before it
        wrote that down.
        """
        host.end_processes(host.processes_with(console_word(self._folder)))

    def _start(self, built: image.Image, links: Sequence[Link], files: Sequence[int]) -> int:
        argv = [
            _QEMU, "-name", f"netlab-{self._plan.name}", "-accel", "tcg,thread=single",
            "-cpu", _PROCESSOR, "-smp", "1", "-m", str(_MEMORY_MB),
            "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-kernel", str(built.kernel), "-initrd", str(built.ramdisk),
            "-append", "console=ttyS0 quiet loglevel=1 panic=-1 mitigations=off ipv6.disable=1",
            "-chardev", console_word(self._folder),
            "-serial", "chardev:console",
        ]  # fmt: skip
        for number, file in enumerate(files):
            slot, function = divmod(number, 8)
            end = links[number // 2].ends[number % 2]
            argv += ["-netdev", f"tap,id=n{number},fd={file}"]
            # romfile: no boot from the network. Packets may come in one piece of 64 KB; whether
            # they do is the site's setting.
            place = f"addr={slot + 2:x}.{function:x},multifunction=on"
            mac = f"{end.mac[:-2]}1{end.mac[-1]}"
            argv += ["-device", f"virtio-net-pci,netdev=n{number},romfile=,{place},mac={mac}"]
        # A daemon, because it may outlive the process that made it.
        pidfile = self._folder / "qemu.pid"
        host.run([*argv, "-daemonize", "-pidfile", str(pidfile)], files=files)
        return int(pidfile.read_text("utf-8"))


class Console:
    """The serial console of a router VM; one user at a time, all others wait. Use as a context."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = -1
        self._socket: socket.socket | None = None
        self._received = b""
        self._number = 0

    def __enter__(self) -> Self:
        self._lock = os.open(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        _within(ANSWER_S + BOOT_S, self._try_lock, "another command holds the console")
        try:
            _within(ANSWER_S, self._try_connect, "the router VM does not answer at its console")
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._socket is not None:
            self._socket.close()
        os.close(self._lock)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _try_connect(self) -> bool:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(self._path))
        except OSError:
            connection.close()
            return False
        self._socket = connection
        return True

    def wait_until_ready(self, pid: int) -> None:
        """Wait until the VM reads commands; raises LabError with its kernel's output."""
        deadline = time.monotonic() + BOOT_S
        while image.READY.encode() not in self._received:
            if not host.started(pid) or time.monotonic() > deadline or not self._receive(0.5):
                words = " ".join(self._received.decode(errors="replace").split())[-300:]
                raise LabError(f"the router VM did not start: {words or 'it says nothing'}")
        self._received = b""

    def command(self, line: str) -> str:
        """Run a line of shell in the VM and return its output; raises LabError when it failed."""
        assert self._socket is not None
        # An answer that came too late must not count as this one's.
        self._number = time.monotonic_ns() % 10**9
        ending = f"={self._number} ".encode()
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(f"{self._number} {line}\n".encode())
        self._received = b""
        deadline = time.monotonic() + ANSWER_S
        while True:
            before, found, after = self._received.partition(ending)
            if found and b"\n" in after:
                break
            if time.monotonic() > deadline or not self._receive(0.5):
                raise LabError(f"the router VM did not answer within {ANSWER_S:g} s: {line[:100]}")
        said = before.decode(errors="replace").replace("\r", "")
        if after.split()[0] != b"0":
            raise LabError(f"the router VM: {line[:120]}: {' '.join(said.split())[:300]}")
        return said

    def _receive(self, limit_s: float) -> bool:
        """Take what has come; False when the other end is gone."""
        assert self._socket is not None
        self._socket.settimeout(limit_s)
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return True
        except OSError:
            return False
        self._received += data
        return bool(data)


def console_word(folder: Path) -> str:
    """The word on QEMU's command line by which the VM of a laboratory is known."""
    return f"socket,id=console,path={folder / CONSOLE},server=on,wait=off"


def _within(limit_s: float, ready: Callable[[], bool], otherwise: str) -> None:
    deadline = time.monotonic() + limit_s
    while not ready():
        if time.monotonic() > deadline:
            raise LabError(otherwise)
        time.sleep(0.02)


def _cards(link: Link) -> tuple[str, str]:
    return f"eth{2 * link.index}", f"eth{2 * link.index + 1}"


def _join(link: Link) -> str:
    cards = _cards(link)
    # Packets must not be put together on the way (gro): netem would lose them together.
    lines = [f"link set {card} gro_max_size 1500 txqueuelen 1000 promisc on up" for card in cards]
    text = r"\n".join(lines)
    commands = [rf"printf '{text}\n' | /sbin/ip -batch -"]
    for card, other in (cards, cards[::-1]):
        commands += [
            f"/sbin/tc qdisc add dev {card} ingress",
            (
                f"/sbin/tc filter add dev {card} ingress matchall"
                f" action mirred egress redirect dev {other}"
            ),
        ]
    return " && ".join(commands)


def _open_tap() -> tuple[int, str]:
    """Make a tap device, which exists as long as a process holds the file; returns both."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    flags = _TAP | _NO_PI | _VNET_HDR
    try:
        got = fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH22x", b"fsltap%d", flags))
    except OSError:
        os.close(file)
        raise
    return file, got[:16].rstrip(b"\0").decode()
