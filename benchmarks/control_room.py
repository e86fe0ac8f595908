"""The control room with a long journal and many sites, in a real Chromium.

    python benchmarks/control_room.py [--gigabytes 1] [--sites 100] [--updates 50] [--seconds 20]

It writes the journal of a run that never was (segments of 8 MiB, the lines that a parameter server
writes, ten heartbeats for each delta), serves it by `fsl-node status RUN --web`, opens the page and
prints one JSON object a line:

    journal   bytes, lines, rounds, segments
    start     seconds from the command to the printed address; resident MB of the server then
    paint     seconds from the request to the first contentful paint, to the state of all sites, and
              to all of the newest segment
    history   seconds from the command until the course of all segments is drawn; points of a site;
              peak MB
    updates   versions a second that are added; seconds from a version's line to its number on the
              page (median, worst, last): the last one tells whether the page falls behind

cpu_s is the server's CPU time until then, load the machine's load average: on a busy machine the
other seconds are of the queue for a core.

Needs chromium (bin/chromium-setup), playwright and aiohttp (extra `dev`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fsl_async.observe import segments
from fsl_async.observe.history import Course
from fsl_async.observe.journal_lines import fact_fields
from fsl_async.roles.client_facts import ClientFact
from fsl_async.roles.sync.facts import RoundFact, VersionFact

BEGIN = 1_790_000_000.0
ROUND_S = 60.0
BEATS = 10
VALUES = 1_000_000
INCARNATION = 1790000000000000000


def row(name: str, **found: Any) -> None:
    """Print a result."""
    print(json.dumps({"row": name, **found}), flush=True)


class Rounds:
    """Makes the lines of a round of all sites; each is of the form of a real journal."""

    def __init__(self, sites: int) -> None:
        self.names = [f"site-{at:03}" for at in range(sites)]
        self.n = 0
        self._texts: list[str] = []
        self._offsets: list[float] = []
        for at, name in enumerate(self.names):
            for beat in range(BEATS):
                payload: dict[str, Any] = {
                    "step": beat,
                    "tokens": 1000,
                    "tokens_per_s": 500.5,
                    "loss": 3.25,
                }
                payload |= {"lag_median_ms": 1.0, "lag_p99_ms": 9.0, "lag_max_ms": 30.0}
                self._line(beat * 4.0, "event", "heartbeat_received", peer=name, payload=payload)
            call: dict[str, Any] = {"type": "call/1", "round": "@R@", "last": False}
            self._line(45.0, "effect", "send", peer=name, message=call)
            if (at + len(name)) % 10 == 7:  # misses each round: the others go on
                continue
            key = f"{name}/1790000000000000000/@R@/@V@"
            metrics: dict[str, Any] = {"loss": f"@L{at % 7}@", "skipped": 0.0, "snapshot_s": 0.01}
            delta: dict[str, Any] = {
                "key": key,
                "base_digest": "d" * 32,
                "tokens": 65536,
                "steps": 64,
            }
            delta |= {"round": "@R@", "metrics": metrics, "facts": {}}
            stream = f"delta:{key}"
            self._client(46.0, name, "sending", "@R@")
            self._line(46.0, "event", "delta_meta", peer=name, stream=stream, delta=delta)
            self._line(46.0, "effect", "receive_delta", peer=name, stream=stream, delta=delta)
            stored = {"delta": delta, "bytes": VALUES, "norm": 0.5, "digest": "e" * 64}
            self._client(48.0, name, "training", "@R@")
            self._line(48.0, "event", "delta_stored", peer=name, stored=stored, problem=None)
            self._line(48.0, "effect", "send", peer=name, message={"type": "accepted/1"})
        self._line(50.0, "effect", "commit", version="@V@", merged={"items": sites})
        committed: dict[str, Any] = {
            "version": "@V@",
            "digest": "f" * 32,
            "bytes_update": VALUES,
            "seconds": 0.5,
        }
        committed |= {"cosine": 0.25, "product_norms": {}}
        self._line(51.0, "event", "version_committed", **committed)
        made = fact_fields(VersionFact(0, "f" * 32, 0, cosine=0.25, loss=3.0))
        deltas = dict.fromkeys(self.names, 1)
        self._line(51.0, "fact", "version", **{**made, "version": "@V@", "deltas": deltas})
        self._line(51.0, "fact", "round", **fact_fields(RoundFact("ready")))
        for name in self.names:
            self._line(52.0, "event", "version_sent", peer=name, version="@V@", bytes_coded=VALUES)
            self._line(53.0, "event", "holding", peer=name, version="@V@", digest="f" * 32)
            self._client(53.0, name, "training", "@V@")
        traffic = {"deltas up": 1000, "versions down": 1000}
        sockets = {"up": 1000, "down": 1000}
        self._line(
            54.0, "note", "traffic", payload=traffic, coded=traffic, sockets=sockets, error={}
        )

    def _client(self, offset: float, name: str, state: str, version: str) -> None:
        fields = fact_fields(ClientFact(name, INCARNATION, state))
        self._line(offset, "fact", "client", **{**fields, "version": version})

    def _line(self, offset: float, kind: str, name: str, **fields: Any) -> None:
        body = json.dumps(fields, separators=(",", ":"))[1:-1].replace("%", "%%")
        body = re.sub(r'"(@[RVL]\d?@)"', r"\1", body)
        self._texts.append(
            f'{{"n":%d,"t":%.6f,"now":%.3f,"kind":"{kind}","type":"{name}","cause":null,{body}}}\n'
        )
        self._offsets.append(offset)

    def text(self, number: int, begin: float) -> str:
        """The lines of round `number`."""
        values: list[float] = []
        for at, offset in enumerate(self._offsets):
            values += [self.n + at, begin + offset, begin - BEGIN + offset]
        self.n += len(self._offsets)
        made = "".join(self._texts).replace("@R@", str(number)).replace("@V@", str(number + 1))
        for at in range(7):
            made = made.replace(f"@L{at}@", f"{10 / (1 + number) ** 0.1 + at / 20:.6f}")
        return made % tuple(values)


def beginning(rounds: Rounds) -> str:
    """The lines before the first round."""
    started: dict[str, Any] = {
        "role": "ps",
        "run": "bench",
        "address": "tcp://127.0.0.1:7100",
        "pid": 0,
    }
    started |= {"host": "elsewhere", "every_s": ROUND_S, "quorum": 0.5, "encrypted": True}
    lines: list[tuple[str, dict[str, Any]]] = [
        ("node_started", {**started, "grace": [4.0, 1.0, 60.0]})
    ]
    for name in rounds.names:
        begun = ClientFact(name, INCARNATION, "joining", begins=True)
        lines.append(("client", fact_fields(begun)))
        lines.append(("model_attached", {"peer": name, "values": VALUES, "difference": None}))
    lines.append(("version", fact_fields(VersionFact(0, "d" * 32, 0))))
    holds = (ClientFact(name, INCARNATION, "training", 0) for name in rounds.names)
    lines += [("client", fact_fields(one)) for one in holds]
    text = ""
    for kind, fields in lines:
        line: dict[str, Any] = {
            "n": rounds.n,
            "t": BEGIN,
            "now": 0.0,
            "kind": "event",
            "type": kind,
            **fields,
        }
        text += json.dumps(line) + "\n"
        rounds.n += 1
    return text


def generate(folder: Path, size: int, rounds: Rounds) -> int:
    """Write a journal of `size` bytes; returns the number of rounds."""
    folder.mkdir(parents=True)
    path = folder / "journal.jsonl"
    course = Course()
    text = beginning(rounds)
    for line in text.splitlines():
        course.apply(json.loads(line))
    file = path.open("w")
    written = here = file.write(text)
    number = segment = 0
    while written < size:
        text = rounds.text(number, BEGIN + ROUND_S * number)
        count = file.write(text)
        written, here = written + count, here + count
        number += 1
        for line in text.splitlines():
            course.apply(json.loads(line))
        if here >= segments.SEGMENT_BYTES and written < size:
            segment += 1
            file.close()
            path.rename(folder / f"journal.{segment}.jsonl")
            file = path.open("w")
            sum_of = segments.Total(course).as_fields()
            head = {"n": rounds.n, "t": BEGIN + ROUND_S * number, "now": 0.0, "kind": "note"}
            here = file.write(
                json.dumps({**head, "type": "so_far", "cause": None, **sum_of}) + "\n"
            )
            rounds.n += 1
    file.close()
    row("journal", bytes=written, lines=rounds.n, rounds=number, segments=segment + 1)
    return number


def busy(pid: int) -> dict[str, float]:
    """CPU seconds of a process, and the machine's load average."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    return {
        "cpu_s": round((int(fields[11]) + int(fields[12])) / ticks, 2),
        "load": round(os.getloadavg()[0], 1),
    }


def megabytes(pid: int, what: str) -> float:
    """VmRSS or VmHWM of a process, MB."""
    found = re.search(rf"{what}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return round(int(found[1]) / 1e3, 1) if found else 0.0


def add_updates(page: Any, path: Path, rounds: Rounds, number: int, args: Any) -> None:
    """Add `--updates` versions a second, and look how long each takes to be shown."""
    page.evaluate(
        """() => {
          window.seen = {};
          const look = () => {
            const node = [...room.nodes.values()][0];
            const shown = node.article.querySelector('.facts dd');
            const version = shown ? Number(shown.textContent.replace(/,/g, '')) : 0;
            if (!(version in window.seen)) window.seen[version] = Date.now() / 1000;
            requestAnimationFrame(look);
          };
          look();
        }"""
    )
    written: dict[int, float] = {}
    begun = time.time()
    with path.open("a") as file:
        for at in range(int(args.seconds * args.updates)):
            version = number + at + 1
            line: dict[str, Any] = {
                "n": rounds.n,
                "t": time.time(),
                "now": 0.0,
                "kind": "event",
                "cause": None,
            }
            line |= {"type": "version", **fact_fields(VersionFact(version, "d", 0, cosine=0.1))}
            rounds.n += 1
            file.write(json.dumps(line) + "\n")
            file.flush()
            written[version] = time.time()
            time.sleep(max(0.0, begun + (at + 1) / args.updates - time.time()))
    page.wait_for_function(f"() => {max(written)} in window.seen", timeout=60_000)
    seen = {int(key): at for key, at in page.evaluate("window.seen").items()}
    shown = sorted(seen)
    lags = []
    for version, begun in written.items():  # shown with the first later number
        later = next(one for one in shown if one >= version)
        lags.append(seen[later] - begun)
    row(
        "updates",
        per_second=args.updates,
        seconds=args.seconds,
        lag_median_s=round(statistics.median(lags), 3),
        lag_worst_s=round(max(lags), 3),
        lag_last_s=round(lags[-1], 3),
        redrawn=page.evaluate("room.drawn"),
    )


def measure(folder: Path, rounds: Rounds, number: int, args: argparse.Namespace) -> None:
    """Serve the journal and open the page."""
    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-u", "-m", "fsl_async.cli", "status", str(folder), "--web"]
    begun = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            row(
                "start",
                seconds=round(time.monotonic() - begun, 2),
                megabytes=megabytes(process.pid, "VmRSS"),
                **busy(process.pid),
            )
            found = re.search(r"http\S+", line)
            assert found is not None, line
            with sync_playwright() as driver:
                browser = driver.chromium.launch(
                    executable_path=shutil.which("chromium"), args=["--no-sandbox"]
                )
                page = browser.new_page()
                opened = time.monotonic()
                page.goto(found[0], wait_until="commit")
                page.wait_for_function("() => document.querySelector('.facts dd')")
                state = time.monotonic() - opened
                page.wait_for_function(
                    "() => document.body.dataset.complete === 'yes' && room.idle()", timeout=60_000
                )
                complete = time.monotonic() - opened
                paint = page.evaluate(
                    "performance.getEntriesByName('first-contentful-paint')[0].startTime / 1000"
                )
                row(
                    "paint",
                    first_s=round(paint, 3),
                    state_s=round(state, 2),
                    newest_segment_s=round(complete, 2),
                    **busy(process.pid),
                )
                page.wait_for_function(
                    "() => { const node = [...room.nodes.values()][0];"
                    " return node.chart && node.chart.data[0][0] === 0"
                    f" && node.state.version >= {number}"
                    " && !node.state.loading && room.idle(); }",
                    timeout=1_800_000,
                )
                points = "[...room.nodes.values()][0].chart.data[0].length"
                row(
                    "history",
                    seconds=round(time.monotonic() - begun, 1),
                    points=page.evaluate(points),
                    megabytes=megabytes(process.pid, "VmRSS"),
                    peak_megabytes=megabytes(process.pid, "VmHWM"),
                    **busy(process.pid),
                )
                add_updates(page, folder / "journal.jsonl", rounds, number, args)
                row("end", peak_megabytes=megabytes(process.pid, "VmHWM"), **busy(process.pid))
                browser.close()
        finally:
            process.terminate()


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--updates", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="control-room-") as scratch:
        rounds = Rounds(args.sites)
        number = generate(Path(scratch) / "run", int(args.gigabytes * 1e9), rounds)
        measure(Path(scratch) / "run", rounds, number, args)


if __name__ == "__main__":
    main()
