"""The container files of examples/containers: read as YAML, and their commands as fsl-node does."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fsl_async import cli
from fsl_async.errors import ExitCode

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")

ROOT = Path(__file__).parents[2]
CONTAINERS = ROOT / "examples" / "containers"
CLIENTS = ("site-a", "site-b", "site-c")


def make_keys(folder):
    words = ["sh", CONTAINERS / "make_keys.sh", folder, "ps:7100", "site-a"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    subprocess.run(words, env={**os.environ, "PATH": path}, check=True, timeout=120)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Keys and address as make_keys.sh makes them."""
    make_keys(folder := tmp_path_factory.mktemp("keys"))
    return folder


def compose():
    return yaml.safe_load((CONTAINERS / "compose.yaml").read_text())


def kubernetes():
    documents = yaml.safe_load_all((CONTAINERS / "kubernetes.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def dry_run(words, keys, capsys, monkeypatch):
    """Run the words of a node with --dry-run; returns the exit code and what it printed."""
    monkeypatch.setenv("FSL_KEYS", str(keys))
    code = cli.main([*words, "--dry-run"])
    found = capsys.readouterr()
    return code, found.out + found.err


def test_keys_made_twice_are_the_same_and_trusted_by_name(keys):
    """A second `up` of the Compose file must not lock its own sites out."""
    make_keys(keys)
    allowed = (keys / "ps" / "allowed.txt").read_text()
    public = re.search(r"^public (\S+)$", (keys / "site-a" / "node.key").read_text(), re.MULTILINE)
    assert public
    assert allowed.count(public[1]) == 1
    assert re.fullmatch(r"fsl://ps:7100\?key=\S+\n", (keys / "address").read_text())


@pytest.mark.parametrize("service", ["ps", "site-a", "site-b", "site-c", "relay-c"])
def test_fsl_node_takes_the_commands_of_the_compose_file(service, keys, capsys, monkeypatch):
    """An option that is renamed must be renamed here."""
    found = compose()["services"][service]
    words = [word.replace("/data", str(ROOT / "docs")) for word in found["command"]]
    if service != "ps":
        words.append((keys / "address").read_text().strip())
    folder = keys / ("site-a" if service in CLIENTS else "ps")
    code, printed = dry_run(words, folder, capsys, monkeypatch)
    assert code == ExitCode.DONE, printed


@pytest.mark.parametrize(
    ("which", "name"), [(("Deployment", "fsl-ps"), "ps"), (("Job", "fsl-site-a"), "site-a")]
)
def test_fsl_node_takes_the_commands_of_the_kubernetes_file(which, name, keys, capsys, monkeypatch):
    """The same, and its keys are those that were mounted."""
    spec = kubernetes()[which]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    address = (keys / "address").read_text().strip()
    words = [
        word.replace("/data", str(ROOT / "docs")).replace("$(FSL_SERVER)", address)
        for word in container["args"]
    ]
    code, printed = dry_run(words, keys / name, capsys, monkeypatch)
    assert code == ExitCode.DONE, printed
    volumes = {one["name"] for one in spec["volumes"]}
    mounted = [*container["volumeMounts"], *spec["initContainers"][0]["volumeMounts"]]
    assert {one["name"] for one in mounted} == volumes


def test_nothing_is_killed_before_its_grace_is_over():
    """The last delta has the time of --grace; SIGKILL must come later."""
    services = compose()["services"]
    for name in CLIENTS:
        words = services[name]["command"]
        grace = int(words[words.index("--grace") + 1])
        assert grace < int(services[name]["stop_grace_period"].removesuffix("s"))
    spec = kubernetes()["Job", "fsl-site-a"]["spec"]["template"]["spec"]
    words = spec["containers"][0]["args"]
    assert int(words[words.index("--grace") + 1]) < spec["terminationGracePeriodSeconds"]


def test_kubernetes_treats_exit_codes_as_they_are_documented():
    """A preempted client comes back without being counted; a wrong option ends the Job."""
    job = kubernetes()["Job", "fsl-site-a"]["spec"]
    by_code = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {
        int(ExitCode.RELAUNCH): "Ignore",
        int(ExitCode.BAD_INPUT): "FailJob",
        int(ExitCode.INTERRUPTED): "FailJob",
    }
    assert job["template"]["spec"]["restartPolicy"] == "Never", "as a podFailurePolicy needs"
    server = kubernetes()["Deployment", "fsl-ps"]["spec"]
    assert (server["replicas"], server["strategy"]["type"]) == (1, "Recreate")


def test_only_the_relay_is_on_both_networks():
    """Site C reaches its relay alone."""
    found = compose()
    assert found["networks"]["site-c"] == {"internal": True}
    on = {name: one.get("networks", []) for name, one in found["services"].items()}
    assert [name for name, networks in on.items() if "site-c" in networks] == ["relay-c", "site-c"]
    assert on["site-c"] == ["site-c"]


@pytest.mark.parametrize("name", ["Dockerfile", "fsl-async.def"])
def test_an_image_is_made_of_what_the_package_needs(name):
    """The build's context is the repository's root."""
    text = (CONTAINERS / name).read_text()
    for path in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        assert re.search(rf"^(COPY.*|    ){re.escape(path)} ", text, re.MULTILINE)
    for folder in ("codecs", "transport", "fsl_async"):
        assert re.search(rf"^(COPY|   ) {folder} (/src/)?{folder}$", text, re.MULTILINE)
        assert (ROOT / folder).is_dir()
