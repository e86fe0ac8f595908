"""`fsl-node demo --net` starts its nodes in the sites, at the sites' addresses."""

import json
import os
import subprocess
from pathlib import Path

from fsl_async.tools.demo.settings import SERVER, DemoSettings, Places, places_in


def demo_of(places, run_dir=Path("run")):
    return DemoSettings(
        data="",
        seconds=40.0,
        clients=2,
        format="e4m3",
        every_s=4.0,
        seed=3,
        preset="0.5m",
        run_dir=run_dir,
        places=places,
    )


def test_the_command_lines_of_sites():
    """The site's prefix must precede a node's command, and addresses must be reachable."""
    demo = demo_of(Places("10.77.0.1", {SERVER: ("ip", "s"), "client-1": ("ip", "c")}))
    server, client = demo.server().argv, demo.client("client-1", "tcp://10.77.0.1:5").argv
    assert server[:2] == ("ip", "s")
    assert "tcp://10.77.0.1:0" in server
    assert client[:2] == ("ip", "c")
    assert "--insecure" in server
    assert "--insecure" in client
    here = demo_of(Places()).client("client-1", "tcp://10.77.0.1:5").argv
    assert (*here, "--insecure") == client[2:]


def test_a_server_in_its_site(built, tmp_path):
    """The parameter server must bind the site's address, which this machine does not have."""
    child = demo_of(places_in(built), tmp_path).server()
    with subprocess.Popen(
        child.argv, env={**os.environ, **child.env}, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            record = next(
                found
                for line in process.stdout
                if (found := json.loads(line)).get("event") == "listening"
            )
        finally:
            process.terminate()
            process.communicate(timeout=30)
    assert record["address"].startswith(f"tcp://{built.address(SERVER)}:")
