"""examples/two_firewalls.py: a short run of each method through its relay, and Ctrl-C."""

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


@pytest.mark.slow
def test_both_runs_end_with_equal_weights_and_nothing_remains(start, left, tmp_path):
    """The example itself fails unless firewalls hold, nothing is lost, and digests are equal."""
    folder = tmp_path / "two"
    process, name = start("--lora", 2, "--zeroth", 4, "--cut", 2, "--dir", folder)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    assert left(name) == []
    trip_ms = float(re.search(r"takes (\d+) ms", output)[1])
    assert 300 <= trip_ms < 600
    assert output.count("reaches relay:7100; not ps:7100") == 2
    assert output.count("the link of site-b is healed") == 2
    lora, zeroth = re.split(r"\n(?:lora|zeroth):\n", output)[1:]
    for text, rounds in ((lora, 2), (zeroth, 4)):
        assert f"  {rounds} rounds of" in text
        assert re.search(r"digest [0-9a-f]{16,} at ps, site-a, site-b", text)
    # What a site sends in a round of zeroth order is mostly heads of packets and of messages.
    sizes = {
        text: [float(found.replace(",", "")) for found in re.findall(r"round ([\d,]+) B up", text)]
        for text in (lora, zeroth)
    }
    assert min(sizes[lora]) > 10_000
    assert max(sizes[zeroth]) < 5_000


@pytest.mark.slow
def test_ctrl_c_removes_namespaces_and_processes(start, left):
    """Also while its first run begins."""
    process, name = start()
    for line in process.stdout:
        if line.startswith("lora:"):
            break
    assert left(name)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, output
    assert output.splitlines()[-1].startswith("stopped;")
    assert left(name) == []
