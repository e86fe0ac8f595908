"""What goes wrong at the edges: one line that says what and what to do, exit code 2, nothing lost."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.slow


def refused(process, *words):
    """A process must end with code 2 and exactly one error line that holds the words."""
    assert process.end() == 2, process.text
    errors = [line for line in process.lines if line.startswith("error: ")]
    assert len(errors) == 1, process.text
    assert "Traceback" not in process.text
    for word in words:
        assert word in errors[0], errors[0]


def finished_run(site, rounds=3):
    """Make a run directory with a few versions."""
    server = site.server(run__rounds=rounds)
    client = site.client("a")
    assert server.end() == 0, server.text
    assert client.end() == 0, client.text
    server.kill()


def test_a_port_in_use_is_named(site):
    """The most common mistake: a server that runs already."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = site.start("--role", "ps", "--run-dir", site.run_dir, f"127.0.0.1:{port}")
        refused(server, "port in use", str(port))
    assert not site.run_dir.exists(), "what never listened leaves nothing behind"
    elsewhere = site.start(
        "--role", "ps", "--insecure", "--run-dir", site.run_dir, "192.0.2.7:7100"
    )
    refused(elsewhere, "cannot listen at tcp://192.0.2.7:7100")
    assert not site.run_dir.exists()


def test_a_run_directory_in_use_is_refused(site):
    """Two servers on one directory would make two lineages."""
    site.server()
    site.address = "127.0.0.1:0"
    second = site.start("--role", "ps", "--run-dir", site.run_dir, site.address)
    refused(second, str(site.run_dir))


def test_another_model_is_refused_with_both_shapes(site):
    """The line says which tensor differs; the run of the others goes on."""
    site.server()
    site.client("a")
    site.wait_version(1)
    wide = site.client("b", "wide")
    refused(wide, "weight", "3x1", "5x1")
    at = max(one["version"] for one in site.ledger("version"))
    site.wait_version(at + 1)


def test_what_a_task_raises_is_said_to_be_the_tasks(site):
    """The user's own mistake is named with its line, and is not called a bug of ours."""
    site.server()
    (site.folder / "raises.py").write_text("def train(fed):\n    raise ValueError('boom')\n")
    task = f"{site.folder / 'raises.py'}:train"
    client = site.start("--role", "client", "--name", "a", "--task", task, site.address)
    assert client.end() == 1, client.text
    assert client.lines[-1].endswith("raises.py:2 raised ValueError: boom"), client.text
    assert "bug" not in client.text


def test_nan_is_quarantined_and_the_round_goes_on(site):
    """Poison is kept out, named in the journal, and the poisoned client goes back to the run's weights."""
    server = site.server()
    site.client("a")
    poisoned = site.client("b", "poisoned")
    server.wait_for("quarantined delta b/")
    at = max(one["version"] for one in site.ledger("version"))
    site.wait_version(at + 3)
    assert 1 <= len(site.ledger("quarantined")) <= 4
    assert "NaN" in site.ledger("quarantined")[0]["reason"]
    late = {one["key"].split("/")[0] for one in site.ledger("version")[-1]["merged"]}
    assert late == {"a", "b"}, "the poisoned client takes part again"
    journal = (site.run_dir / "journal.jsonl").read_text()
    assert "quarantined" in journal
    server.signal(signal.SIGINT)
    poisoned.wait_for("weights finite True")


def test_a_flipped_byte_is_named_and_the_version_before_offered(site):
    """A damaged checkpoint is never trained on; the command to go on from the one before is in the line."""
    finished_run(site)
    weights = site.run_dir / "checkpoints" / "v00000003" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    site.address = "127.0.0.1:0"
    damaged = site.start("--role", "ps", "--run-dir", site.run_dir, site.address)
    refused(damaged, "version 3", "weights.safetensors", "--from-version 2")
    server = site.server("--from-version", 2, run__rounds=4)
    server.wait_for("version 2")
    site.client("a")
    assert server.end() == 0, server.text


def test_another_model_configuration_is_refused_at_a_restart(site):
    """The run's weights stay what they are; what only says how the run goes on may change."""
    finished_run(site, rounds=2)
    site.address = "127.0.0.1:0"
    start = ["--role", "ps", "--run-dir", site.run_dir, "--set"]
    other = site.start(*start, "model.preset=1m", site.address)
    refused(other, 'model.preset = "3m", and this start has "1m"', "--run-dir")
    server = site.server(run__rounds=3, every_s=1.0, codec__up="bf16")
    site.client("a")
    assert server.end() == 0, server.text


def test_random_bytes_on_the_port_are_ignored_and_counted(site):
    """Port scanners and lost clients must cost nothing."""
    server = site.server()
    site.client("a")
    site.wait_version(1)
    host, port = site.address.rsplit(":", 1)
    chance = random.Random(1)
    for size in (1, 10, 64, 1000, 100_000):
        with socket.create_connection((host, int(port))) as stranger:
            try:
                stranger.sendall(chance.randbytes(size))
                stranger.settimeout(0.2)
                stranger.recv(100)
            except OSError:
                pass
    at = max(one["version"] for one in site.ledger("version"))
    site.wait_version(at + 2)
    assert "GarbageSeen" in (site.run_dir / "journal.jsonl").read_text(), "while it still runs"
    server.signal(signal.SIGINT)
    assert server.end() == 130
    last = (site.run_dir / "journal.jsonl").read_text().splitlines()
    ended = [line for line in last if '"NodeEnded"' in line]
    assert ended
    assert '"garbage":0' not in ended[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_keeps_the_last_good_version(site):
    """Checkpoints fail, the run waits and says so; with room again it goes on, and nothing acknowledged is lost."""
    site.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(site.run_dir)]
    if subprocess.run(mount, check=False, capture_output=True).returncode != 0:
        pytest.skip("this system does not let us mount a tmpfs")
    try:
        server = site.server()
        site.client("a")
        site.wait_version(1)
        ballast = site.run_dir / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(b"x" * 4096)

            except OSError:
                pass
        deadline = time.monotonic() + 30
        full = ("could not be written", "broke off", "cannot")
        while not any(word in server.text for word in full) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert any(word in server.text for word in full), server.text
        at = max(one["version"] for one in site.ledger("version"))
        assert server.popen.poll() is None
        ballast.unlink()
        site.wait_version(at + 2)
        server.signal(signal.SIGINT)
        assert server.end() == 130
        keys = [one["key"] for version in site.ledger("version") for one in version["merged"]]
        assert len(keys) == len(set(keys))
        assert {one["key"] for one in site.ledger("accepted")} <= set(keys)
    finally:
        site.close()
        subprocess.run(["umount", str(site.run_dir)], check=False)
        shutil.rmtree(site.run_dir, ignore_errors=True)


def test_an_unreachable_server_is_said_every_ten_seconds(site):
    """A client keeps trying, and tells that it does."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    site.address = f"127.0.0.1:{port}"
    client = site.client("a")
    client.wait_for(f"no answer from tcp://127.0.0.1:{port} for 10 s", 30)
    assert client.popen.poll() is None


@pytest.mark.parametrize("arguments", [["--role", "ps"], ["demo"]])
def test_a_short_data_path_is_refused_at_once(tmp_path, arguments):
    """Not after everything was started."""
    path = tmp_path / "short.txt"
    path.write_text("too short")
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "fsl_async.cli", *arguments, "--data", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert str(path) in done.stderr
    assert time.monotonic() - begun < 30
