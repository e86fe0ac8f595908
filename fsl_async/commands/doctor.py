"""`fsl-node doctor`: checks this machine and this install, and prints how to fix problems."""

from __future__ import annotations

import importlib
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import click
from attrs import asdict, field, frozen

from fsl_async.commands.options import WithJson, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import PROGRAM, to_install
from fsl_async.roles.phrasing import counted, megabytes

OK = "ok"
WARNING = "warning"
PROBLEM = "problem"

_PACKAGES = ("attrs", "cattrs", "click", "msgpack", "numpy", "pyzmq", "torch")
# Of each extra of pyproject.toml that commands use, a package that only it brings.
_EXTRAS = {
    "web": "aiohttp",
    "prometheus": "prometheus_client",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "hf": "transformers",
    "datasets": "datasets",
    "gguf": "gguf",
    "dp": "opacus",
    "secure": "cryptography",
    "plot": "matplotlib",
    "lightning": "lightning",
}
_LOW_DISK_BYTES = 10e9
_NO_DISK_BYTES = 1e9
_FEW_CLIENTS = 100
"""A limit of open files that fits fewer clients is a warning."""
_SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")

# Feature bits that the native codec needs, by their names in /proc/cpuinfo.
_FEATURES = {
    "avx512": (
        "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vbmi", "avx512_vbmi2",
        "vpclmulqdq",
    ),
    "avx2": ("avx2", "bmi1", "bmi2", "f16c", "pclmulqdq", "popcnt"),
}  # fmt: skip


@frozen
class Finding:
    """The result of one check.

    status: "ok", "warning" (works, but not well) or "problem". text: the line that is printed.
    """

    name: str
    status: str
    text: str
    details: dict[str, Any] = field(factory=dict)


Result: TypeAlias = tuple[str, str] | tuple[str, str, dict[str, Any]]
"""The status, text and details of a finding."""


class DoctorOptions(WithJson):
    """The options of `fsl-node doctor`."""

    run_dir: Path | None = option(
        "Directory of runs; its disk is checked. [default: here]", metavar="DIR"
    )


@click.command("doctor")
@takes(DoctorOptions)
def command(options: DoctorOptions) -> int:
    """Check what a run needs: versions, codec, GPU, network, TCP, open files, disk.

    Exit code 0 when a node can run here, also with warnings; 1 when there is a problem.
    """
    output = Output(as_json=options.as_json)
    findings = examine(options.run_dir or Path())
    problems = sum(finding.status == PROBLEM for finding in findings)
    width = max(len(finding.name) for finding in findings)
    output.answer(
        {"ok": not problems, "findings": [asdict(finding) for finding in findings]},
        *(f"{one.status:7}  {one.name:{width}}  {one.text}" for one in findings),
    )
    return 1 if problems else 0


def examine(run_dir: Path) -> list[Finding]:
    """All findings; a check that raises is a finding, too."""
    checks: dict[str, Callable[[], Result]] = {
        "versions": _versions,
        "extras": _extras,
        "codec": _codec,
        "torch": _torch,
        "event loop": _event_loop,
        "network": _network,
        "TCP": _tcp,
        "keys": _keys,
        "open files": _open_files,
        "disk": lambda: _disk(run_dir),
    }
    findings = []
    for name, check in checks.items():
        try:
            findings.append(Finding(name, *check()))
        except Exception as error:  # noqa: BLE001 - importing a broken package can raise anything
            findings.append(Finding(name, PROBLEM, f"{type(error).__name__}: {error}"))
    return findings


def _versions() -> Result:
    found = {"python": platform.python_version(), PROGRAM: _version_of("fsl-async")}
    found |= {package: _version_of(package) for package in _PACKAGES}
    missing = [name for name, number in found.items() if not number]
    system = f"{platform.system()} {platform.machine()}"
    text = ", ".join(f"{name} {number}" for name, number in found.items() if number)
    if missing:
        text = f"not installed: {', '.join(missing)}; install fsl-async again. {text}"
    return PROBLEM if missing else OK, f"{text}; {system}", {**found, "system": system}


def _extras() -> Result:
    found = {extra: _version_of(package) for extra, package in _EXTRAS.items()}
    missing = [extra for extra, number in found.items() if not number]
    text = ", ".join(extra for extra, number in found.items() if number) or "none"
    if missing:
        text += f"; not installed: {', '.join(missing)} (as in: {to_install(missing[0])})"
    return OK, text, {"missing": missing}


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _codec() -> Result:
    dispatch = importlib.import_module("fsl_codecs.dispatch")
    choice, available = dispatch.choice(), dispatch.available()
    lacking = _lacking_features()
    details = {
        "implementation": choice.chosen.name,
        "reason": choice.reason,
        "available": list(available),
        "variable": os.environ.get(dispatch.VARIABLE, ""),
        "lacking_cpu_features": lacking,
    }
    text = f"{choice.chosen.name}: {choice.reason}"
    better = available[0]
    if better != choice.chosen.name:
        return WARNING, f"{text}; {better} would be faster", details
    if better == "numpy":
        return WARNING, f"{text}. NumPy gives the same bytes, slowly", details
    for path, features in lacking.items():
        if path not in available and features:
            text += f"; {path} would need {' '.join(features)}"
    return OK, text, details


def _lacking_features() -> Mapping[str, list[str]]:
    """CPU features that each path of the native codec lacks; empty where they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return {}
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), None)
    if flags is None:
        return {}
    return {
        path: [feature for feature in features if feature not in flags]
        for path, features in _FEATURES.items()
    }


def _torch() -> Result:
    torch = importlib.import_module("torch")
    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            devices.append({"name": about.name, "memory_bytes": about.total_memory})
    details = {"cuda": torch.version.cuda, "threads": torch.get_num_threads(), "gpus": devices}
    if devices:
        names = ", ".join(f"{one['name']} with {megabytes(one['memory_bytes'])}" for one in devices)
        return OK, names, details
    why = "built without CUDA" if torch.version.cuda is None else "CUDA finds none"
    threads = counted(torch.get_num_threads(), "thread")
    text = f"no GPU ({why}), {threads}: enough for a parameter server and small models"
    return OK, text, details


def _event_loop() -> Result:
    if sys.platform == "win32":
        return OK, "asyncio", {"uvloop": ""}
    number = _version_of("uvloop")
    if not number:
        return WARNING, "asyncio's own: uvloop is not installed", {"uvloop": ""}
    importlib.import_module("uvloop")
    return OK, f"uvloop {number}", {"uvloop": number}


def _network() -> Result:
    zmq = importlib.import_module("zmq")
    details = {"libzmq": zmq.zmq_version(), "curve": zmq.has("curve")}
    if not details["curve"]:
        text = (
            f"libzmq {details['libzmq']} without CURVE: connections cannot be encrypted;"
            " install pyzmq from its wheels"
        )
        return WARNING, text, details
    return OK, f"libzmq {details['libzmq']} with CURVE", details


def _tcp() -> Result:
    try:
        setting = _SLOW_START.read_text(encoding="ascii").strip()
    except OSError:
        return OK, "no settings to check here"
    details = {"slow_start_after_idle": setting}
    if setting == "0":
        return OK, "connections keep their speed after a pause", details
    text = (
        "connections start slowly after a pause; with round trips of 50 ms and more, this at both"
        " ends saves time: sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
    )
    return OK, text, details


def _keys() -> Result:
    folders = importlib.import_module("fsl_async.keys.folder")
    errors = importlib.import_module("fsl_async.errors")
    folder = folders.KeysFolder()
    details: dict[str, Any] = {"path": str(folder.path), "public": "", "trusted": 0}
    if not folder.has_pair():
        text = f"none in {folder.path}; between machines a node needs one: {folder.command('new')}"
        return OK, text, details
    try:
        details["public"] = folder.pair().public
        trusted = folder.allowed()
    except errors.KeysError as error:
        return PROBLEM, error.message, details
    details["trusted"] = count = 0 if trusted is None else len(trusted.entries)
    text = f"{details['public']} in {folder.path}; as a listener it trusts {count}"
    return OK, text, details


def _open_files() -> Result:
    try:
        resource = importlib.import_module("resource")
    except ImportError:  # Windows
        return OK, "no limit to check here"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    settings = importlib.import_module("fsl_async.config.settings")
    capacities = importlib.import_module("fsl_async.nodes.capacity")
    relays = importlib.import_module("fsl_async.nodes.relay.relay")
    capacity = capacities.capacity_of(settings.Config())
    relay = relays.connections_allowed()
    details = {"soft": soft, "hard": hard, **capacity.facts, "relay_connections": relay}
    raised = "" if soft in {capacity.files, resource.RLIM_INFINITY} else f" ({soft:,} until raised)"
    fits = f"room for {capacity.fits:,} clients at a parameter server"
    text = f"{capacity.files:,} allowed{raised}: {fits}"
    if not capacity.is_enough:
        text += f"; it needs {capacity.files_needed} for {capacity.clients}: ulimit -n 65536"
    elif capacity.fits < _FEW_CLIENTS:
        text += "; for more, ulimit -n 65536"
    if relay < relays.LEAST_CONNECTIONS:
        text += "; too few for a relay"
    is_few = capacity.fits < _FEW_CLIENTS or relay < relays.LEAST_CONNECTIONS
    return WARNING if is_few else OK, text, details


def _disk(run_dir: Path) -> Result:
    folder = run_dir.resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    details = {"path": str(folder), "free_bytes": free}
    text = f"{megabytes(free)} free in {folder}"
    if not os.access(folder, os.W_OK):
        return PROBLEM, f"{folder} cannot be written to", details
    if free < _NO_DISK_BYTES:
        return PROBLEM, f"{text}: a run writes more than that", details
    if free < _LOW_DISK_BYTES:
        advice = (
            "a parameter server writes three fp32 copies of the model for each version it keeps"
        )
        return WARNING, f"{text}: {advice}", details
    return OK, text, details
