"""The initial RAM disk of the router VM, built once of what is installed here.

It is kept in the user's cache folder. A Linux kernel unpacks a "newc" cpio archive
(Documentation/driver-api/early-userspace/buffer-format.rst in its sources) into memory and runs
/init. Ours holds busybox, this machine's `ip` and `tc` with their libraries, and those of the
kernel's modules that a router with netem needs. The kernel is the one that `bin/netlab-setup`
unpacked, not this machine's.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import stat
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from attrs import frozen

from netlab.host import SETUP, MissingError, program, run

MODULES = (
    "virtio_pci", "virtio_net", "sch_ingress", "cls_matchall", "act_mirred", "sch_netem",
    "veth",  # so that the other backend can be tried in this kernel
)  # fmt: skip
"""What is wanted; what these depend on comes with them."""

_OLD_S = 86_400.0
READY = "netlab-router-ready"

INIT = f"""#!/bin/busybox sh
# Everything else is done by the lines that come over the serial console: "NUMBER COMMAND"; the
# answer ends with "=NUMBER CODE".
/bin/busybox mkdir -p /proc /sys /dev /run
/bin/busybox mount -t proc none /proc
/bin/busybox mount -t sysfs none /sys
/bin/busybox mount -t devtmpfs none /dev
export PATH=/sbin:/bin
for module in $(/bin/busybox cat /modules/order); do /bin/busybox insmod /modules/$module; done
exec </dev/ttyS0 >/dev/ttyS0 2>&1
/bin/busybox stty -echo -onlcr
echo {READY}
while read -r number line; do
    eval "$line"
    echo "=$number $?"
done
"""


@frozen
class Image:
    """What QEMU boots."""

    kernel: Path
    ramdisk: Path


def cache_folder() -> Path:
    """Where kernel and images are kept; `bin/netlab-setup` has the same rule."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fsl-async" / "netlab"


def build(folder: Path | None = None) -> Image:
    """The image, from the cache when nothing that it is made of changed. Raises MissingError."""
    folder = cache_folder() if folder is None else folder
    kernels = sorted(folder.glob("kernel/boot/vmlinuz-*"))
    if not kernels:
        raise MissingError(
            f"this kernel has no sch_netem, and there is no kernel for a router VM in {folder};"
            f" run {SETUP}"
        )
    kernel = kernels[-1]
    version = kernel.name.removeprefix("vmlinuz-")
    busybox, tools = Path(program("busybox")), [Path(program(name)) for name in ("ip", "tc")]
    contents = _contents(folder / "kernel" / "lib" / "modules" / version, busybox, tools)
    digest = hashlib.sha256()
    for name, content in sorted(contents.items()):
        digest.update(f"{name} {len(content)} ".encode() + content)
    ramdisk = folder / f"router-{version}-{digest.hexdigest()[:16]}.cpio"
    if not ramdisk.exists():
        for old in folder.glob("router-*"):
            if time.time() - old.stat().st_mtime > _OLD_S:  # a newer one may be about to be booted
                old.unlink(missing_ok=True)
        partial = ramdisk.with_suffix(f".{os.getpid()}")
        # Not compressed: the emulated processor is slower than the disk.
        partial.write_bytes(archive(contents))
        partial.rename(ramdisk)
    return Image(kernel, ramdisk)


def _contents(modules: Path, busybox: Path, tools: Iterable[Path]) -> dict[str, bytes]:
    contents = {"init": INIT.encode(), "bin/busybox": busybox.read_bytes()}
    if b"ld-linux" in contents["bin/busybox"][:4096]:
        raise MissingError(f"{busybox} is not static; run {SETUP}")
    for tool in tools:
        contents[f"sbin/{tool.name}"] = tool.read_bytes()
        for library in re.findall(r"(/\S+) \(0x", run(["ldd", str(tool)])):
            contents[library.lstrip("/")] = Path(library).read_bytes()
    files = {
        re.sub(r"\.ko(\.xz)?\Z", "", path.name).replace("-", "_"): path
        for path in modules.rglob("*.ko*")
    }
    loaded: dict[str, bytes] = {}
    for name in MODULES:
        _load(name, files, loaded)
    contents |= {f"modules/{name}.ko": content for name, content in loaded.items()}
    contents["modules/order"] = "\n".join(f"{name}.ko" for name in loaded).encode() + b"\n"
    return contents


def _load(name: str, files: Mapping[str, Path], loaded: dict[str, bytes]) -> None:
    """Add a module behind those that its own `depends=` names. What is no file is built in."""
    path = files.get(name)
    if name in loaded or path is None:
        return
    content = path.read_bytes()
    if path.suffix == ".xz":
        content = lzma.decompress(content)
    depends = re.search(rb"\0depends=([^\0]*)\0", content)
    for other in depends[1].decode().split(",") if depends else []:
        _load(other.replace("-", "_"), files, loaded)
    loaded[name] = content


def archive(contents: Mapping[str, bytes]) -> bytes:
    """A cpio archive in the "newc" format: executable files, their folders, and /dev/console."""
    folders = sorted({str(parent) for name in contents for parent in Path(name).parents} - {"."})
    entries = [(name, stat.S_IFDIR | 0o755, b"", (0, 0)) for name in [*folders, "dev"]]
    entries.append(("dev/console", stat.S_IFCHR | 0o600, b"", (5, 1)))
    entries += [
        (name, stat.S_IFREG | 0o755, content, (0, 0)) for name, content in sorted(contents.items())
    ]
    entries.append(("TRAILER!!!", 0, b"", (0, 0)))
    return b"".join(_entry(number, *entry) for number, entry in enumerate(entries, 1))


def _entry(number: int, name: str, mode: int, content: bytes, device: tuple[int, int]) -> bytes:
    title = name.encode() + b"\0"
    # inode, mode, uid, gid, links, mtime, size, device (2), rdevice (2), length of the name, sum
    numbers = (number, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(title), 0)
    head = b"070701" + b"".join(b"%08X" % one for one in numbers) + title
    return _padded(head) + _padded(content)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)
