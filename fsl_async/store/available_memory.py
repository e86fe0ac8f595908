"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int | None:
    """Return what the system, and the container's limit (cgroup v2), leave; None if unknown."""
    found = []
    try:
        lines = meminfo.read_text().splitlines()
        found += [int(one.split()[1]) * 1024 for one in lines if one.startswith("MemAvailable:")]
    except (OSError, ValueError, IndexError):
        pass
    try:
        limit, used = (cgroup / "memory.max").read_text(), (cgroup / "memory.current").read_text()
        found.append(max(0, int(limit) - int(used)))  # "max" is no number: no limit
    except (OSError, ValueError):
        pass
    return min(found, default=None)
