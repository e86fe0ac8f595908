"""What a link of the network laboratory carries: RTT, one and eight TCP streams, BBR. Needs root.

    python benchmarks/links.py [--profiles dsl,...] [--seconds 12]
        one JSON row for each profile
    python benchmarks/links.py --docs
        writes the rows that were kept into docs/BENCHMARKS.md

Streams are asyncio connections of the standard library (netlab/probe.py), with
iperf3 beside them where it is installed. Mbit/s are 10^6 bits of payload, counted where they
arrive, from the first byte to the last, TCP's slow start included.
"""

from __future__ import annotations

import json
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from iperf3 import iperf3
from netlab.laboratory import Laboratory
from netlab.profiles import profile, profiles

ROWS = Path(__file__).parent / "results" / "netlab.jsonl"
DOCS = Path(__file__).parents[1] / "docs" / "BENCHMARKS.md"
BEGIN, END = "<!-- netlab rows -->", "<!-- end of netlab rows -->"


def measure(lab: Laboratory, name: str, seconds: float) -> dict[str, Any]:
    """One row, between the first two sites."""
    lab.set("all", name)
    server, client = lab.sites[:2]
    settings = profile(name)
    row: dict[str, Any] = {
        "bench": "netlab",
        "profile": name,
        "backend": lab.backend,
        "rate_mbit": settings.rate_mbit or None,
        "delay_ms": settings.delay_ms,
        "round_trip_ms": round(lab.round_trip_ms(client, server, 20), 1),
        "seconds": seconds,
    }
    runs = {"cubic_1": (1, "cubic"), "cubic_8": (8, "cubic")}
    there = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text("utf-8").split()
    if "bbr" in there:
        runs["bbr_1"] = (1, "bbr")
    for title, (streams, congestion) in runs.items():
        found = lab.stream(client, server, seconds=seconds, streams=streams, congestion=congestion)
        row[title] = round(found.mbit_s, 2)
        row[f"{title}_again"] = found.retransmits
    ends = partial(lab.command, server), partial(lab.command, client)
    received = iperf3(lab.address(server), *ends, max(1, int(seconds)), "-P", "8")
    row["iperf3_cubic_8"] = received and round(received["bits_per_second"] / 1e6, 2)
    row["load_1m"] = round(os.getloadavg()[0], 1)
    row["at"] = time.strftime("%Y-%m-%d")
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """The rows for the documentation; of a profile that was measured twice, the last one."""
    found = {row["profile"]: row for row in rows}
    last = {name: found[name] for name in profiles() if name in found}
    lines = [
        (
            "| profile | backend | link Mbit/s | round trip ms | 1 cubic | 8 cubic | 1 BBR | "
            "iperf3, 8 cubic |"
        ),
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in last.values():
        cells = [
            row["profile"], row["backend"], row["rate_mbit"], row["round_trip_ms"],
            row["cubic_1"], row["cubic_8"], row.get("bbr_1"), row["iperf3_cubic_8"],
        ]  # fmt: skip
        shown = (
            "-" if cell is None else f"{cell:g}" if isinstance(cell, float) else str(cell)
            for cell in cells
        )
        lines.append("| " + " | ".join(shown) + " |")
    return "\n".join(lines)


def write_docs() -> None:
    """Write the table between its two marks."""
    rows = [json.loads(line) for line in ROWS.read_text("utf-8").splitlines()]
    text = DOCS.read_text("utf-8")
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    DOCS.write_text(pattern.sub(lambda _: f"{BEGIN}\n{table(rows)}\n{END}", text), "utf-8")


@click.command()
@click.option("--profiles", "names", default=",".join(profiles()), show_default=True)
@click.option("--seconds", default=12.0, show_default=True, help="Of each stream.")
@click.option("--keep", is_flag=True, help=f"Add the rows to {ROWS.name} as well.")
@click.option("--docs", is_flag=True, help="Only write the table of the kept rows.")
def main(names: str, seconds: float, keep: bool, docs: bool) -> None:
    """Measure every profile."""
    if docs:
        write_docs()
        return
    with Laboratory(["server", "client"]) as lab:
        for name in names.split(","):
            row = json.dumps(measure(lab, name, seconds))
            print(row, flush=True)
            if keep:
                with ROWS.open("a", encoding="utf-8") as file:
                    file.write(row + "\n")


if __name__ == "__main__":
    main()
