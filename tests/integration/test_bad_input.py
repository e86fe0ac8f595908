"""Bad input: one line that says what is wrong and what to do, exit code 2, nothing lost."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import msgpack
import pytest
import zmq

from fsl_transport import PROTOCOL_VERSION
from fsl_transport.session import frames

pytestmark = pytest.mark.slow

UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))


def refused(process, *words):
    """Check that a process ends with code 2 and exactly one error line, which holds the words."""
    assert process.end() == 2, process.text
    errors = [line for line in process.lines if line.startswith("error: ")]
    assert len(errors) == 1, process.text
    assert "Traceback" not in process.text
    for word in words:
        assert word in errors[0], errors[0]


def test_an_error_of_a_task_is_attributed_to_the_task(site):
    """The message has the line of the user's file, and does not say bug."""
    site.server()
    (site.folder / "raises.py").write_text("def train(fed):\n    raise ValueError('boom')\n")
    task = f"{site.folder / 'raises.py'}:train"
    client = site.start("--role", "client", "--name", "a", "--task", task, site.address)
    assert client.end() == 1, client.text
    assert client.lines[-1].endswith("raises.py:2 raised ValueError: boom"), client.text
    assert "bug" not in client.text


def test_nan_is_quarantined_and_the_round_goes_on(site):
    """A delta with NaN is not merged, is journaled, and its client returns to the run's weights."""
    server = site.server()
    site.client("a")
    poisoned = site.client("b", "poisoned")
    server.wait_for("quarantined delta b/")
    at = max(one["version"] for one in site.ledger("version"))

    def both_take_part():
        late = [one["merged"] for one in site.ledger("version") if one["version"] > at + 1]
        return any({one["key"].split("/")[0] for one in merged} == {"a", "b"} for merged in late)

    site.wait_until(both_take_part, "the poisoned client takes part again")
    assert "NaN" in site.ledger("quarantined")[0]["reason"]
    journal = (site.run_dir / "journal.jsonl").read_text()
    assert "quarantined" in journal
    assert '"grace":[' in journal, "status --web shows when the window closes"
    server.signal(signal.SIGINT)
    poisoned.wait_for("weights finite True")
    assert '"alarm":"delta","client":"b"' in journal, "status, page and trackers count it"


def flip(path):
    """Flip one bit of the last value."""
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def test_a_finished_run_refuses_another_model_and_a_flipped_byte(site):
    """The model's settings are fixed for a run. The line about a damaged checkpoint has the command
    that goes on from the version before; then settings of the run's further course may change.
    """
    server = site.server(run__rounds=3)
    client = site.client("a")
    assert [server.end(), client.end()] == [0, 0], server.text + client.text
    site.address = "127.0.0.1:0"
    start = ("--role", "ps", "--run-dir", site.run_dir)
    other = site.start(*start, "--set", "model.preset=1m", site.address)
    refused(other, 'model.preset = "3m", and this start has "1m"', "--run-dir")
    weights = site.run_dir / "checkpoints" / "v00000003" / "weights.safetensors"
    flip(weights)
    flip(weights.with_name("update.bin"))
    for spooled in (site.run_dir / "spool").iterdir():  # otherwise it is made again from these
        spooled.unlink()
    damaged = site.start(*start, site.address)
    refused(damaged, "version 3", "weights.safetensors", "--from-version 2")
    server = site.server("--from-version", 2, run__rounds=4, codec__up="bf16")
    server.wait_for("version 2")
    site.client("a")
    assert server.end() == 0, server.text


PROTOCOL_TEXT = (
    "the listener speaks protocol 7, the dialer 1: install the same release on both sides"
)


@pytest.fixture
def later_server():
    """A server of a later release.

    Yields its address, `refuse()`, which answers the next HELLO, and its socket.
    """
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server:
        server.linger = 0
        port = server.bind_to_random_port("tcp://127.0.0.1")

        def refuse():
            assert server.poll(60_000), "no HELLO came"
            peer, head = server.recv_multipart()
            kind, version, incarnation, attempt, name, *_ = msgpack.unpackb(head)
            assert (kind, version, name) == (frames.HELLO, PROTOCOL_VERSION, "a")
            refusal = [frames.REFUSE, 7, incarnation, attempt, "protocol", PROTOCOL_TEXT, 0]
            server.send_multipart([peer, msgpack.packb(refusal)])

        yield f"127.0.0.1:{port}", refuse, server


def test_a_client_refused_for_its_protocol_ends_with_the_servers_text(site, later_server):
    """Another attempt would be refused too: it ends soon, with exit code 2, one line, no
    traceback.
    """
    site.address, refuse, _ = later_server
    task = f"{site.folder / 'task.py'}:train"
    client = site.start("--role", "client", "--name", "a", "--task", task, "--json", site.address)
    refuse()
    assert client.end(7) == 2, client.text
    expected = {"error": PROTOCOL_TEXT, "kind": "RefusedError", "exit_code": 2}
    assert client.lines == [json.dumps(expected)]


def test_a_refused_script_of_the_user_gets_the_error(site, later_server):
    """A script of two lines prints what the program prints, and no traceback."""
    address, refuse, _ = later_server
    script = f"import fsl_async\nfsl_async.join('{address}', name='a')\n"
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=site.folder, text=True, stderr=subprocess.PIPE
    ) as process:
        refuse()
        _, err = process.communicate(timeout=30 * UNIT_S)
    assert (process.returncode, err) == (2, f"error: {PROTOCOL_TEXT}\n")


def test_ctrl_c_without_an_answer_ends_at_once(site, later_server, interrupt):
    """Without a session there is nothing to send or finish; every ten seconds a line says why."""
    site.address, _, server = later_server
    client = site.client("a")
    assert server.poll(60_000), client.text
    client.wait_for(f"no answer from tcp://{site.address} for 10 s", 30)
    client.signal(interrupt)
    assert client.end(5) == 130, client.text
    assert client.lines[-1] == "stopped: Ctrl-C"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_keeps_the_last_good_version(site):
    """Checkpoints fail and the run waits, with a message; with free space it goes on, nothing
    lost.
    """
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
        deadline = time.monotonic() + 30 * UNIT_S
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
