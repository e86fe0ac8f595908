"""examples/two_firewalls.py: short runs through its relay, and Ctrl-C."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "two_firewalls.py"
LIMIT_S = 600


@pytest.fixture
def start(backend, sweeper):
    """Starts the example; returns its process and the name of its laboratory."""
    started = []

    def begin(*options):
        process = subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        name = f"p{process.pid}-1"
        sweeper(name)
        return process, name

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def sent(text):
    """Bytes that each site sends in a round, as printed."""
    return [float(one.replace(",", "")) for one in re.findall(r"wire ([\d,]+) B up", text)]


DIGEST = re.compile(r"digest [0-9a-f]{16,} at ps, site-a, site-b")


@pytest.mark.slow
def test_adapters_travel_through_the_relay_and_ctrl_c_leaves_nothing(start, left, tmp_path):
    """The example itself fails unless firewalls hold, nothing is lost, and digests are equal."""
    process, name = start("--lora", 2, "--zeroth", 4, "--cut", 2, "--dir", tmp_path / "two")
    output = ""
    for line in process.stdout:
        if line.startswith("zeroth:"):
            break
        output += line
    assert left(name), output
    process.send_signal(signal.SIGINT)  # the nodes of the second run are starting
    rest, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output + rest
    assert rest.splitlines()[-1].startswith("stopped;")
    assert left(name) == []
    trip_ms = float(re.search(r"takes (\d+) ms", output)[1])
    assert 300 <= trip_ms < 600
    assert output.count("reaches relay:7100; not ps:7100") == 2
    assert "the link of site-b is healed" in output
    assert DIGEST.search(output), output
    assert all(10_000 < size < 100_000 for size in sent(output))
    assert len(sent(output)) == 2


@pytest.mark.sweep
def test_scalars_travel_through_the_relay(start, left, tmp_path):
    """What a site sends in a round is mostly heads of packets and of messages."""
    process, name = start("--lora", 0, "--zeroth", 6, "--cut", 2, "--dir", tmp_path / "two")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert left(name) == []
    assert DIGEST.search(output), output
    assert all(size < 2_000 for size in sent(output))
    assert len(sent(output)) == 2
