"""How long a parameter server's start takes to read its ledger.

    python benchmarks/ledger_start.py                        6 clients for three months (seconds)
    python benchmarks/ledger_start.py --clients 50 --versions 4320

It writes a ledger as a run would, an "accepted" line for each delta and a "version" line for each
sync, and reads it into the store's book, as a start does. Prints one JSON row: `read_s` is the time
of the same bytes without parsing, the limit; `peak_mb` is the most memory of the process.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from pathlib import Path

import click

from fsl_async.files.checksummed_json import to_checksummed
from fsl_async.files.files import Files
from fsl_async.roles.sync.delta import Delta, DeltaKey, MergedDelta, StoredDelta
from fsl_async.store.book.book import Book
from fsl_async.store.book.records import VersionRecord, to_fact
from fsl_async.store.disk.ledger import Ledger
from fsl_async.store.settings import StoreSettings

EVERY_S = 600.0
METRICS = {"loss": 2.123456, "grad_norm": 0.712345}


def lines(clients: int, version: int) -> list[dict[str, object]]:
    """Return the facts of one sync."""
    keys = [DeltaKey(f"site-{one:03d}.example", 7, version - 1, version) for one in range(clients)]
    deltas = [Delta(key, "d" * 32, 123_456, 100, version, METRICS) for key in keys if version]
    record = VersionRecord(
        version=version, digest=f"{version:032x}", parent="e" * 32, generation=0,
        fingerprint="f" * 32, scale=1.0, tokens_total=123_456 * clients * version,
        merged=tuple(MergedDelta(one, 0, 1.0 / clients, 1.5) for one in deltas),
        update_bytes=12_345_678, update_chunks=100, update_norm=1.0,
    )  # fmt: skip
    accepted = [to_fact(StoredDelta(one, 12_345_678, 1.5, "a" * 64)) for one in deltas]
    return [
        *({"fact": "accepted", **one} for one in accepted),
        {"fact": "version", **record.to_fact()},
    ]


@click.command()
@click.option("--clients", default=6, show_default=True)
@click.option("--versions", default=13_140, show_default=True)
def main(*, clients: int, versions: int) -> None:
    """Write a ledger, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.jsonl"
        with path.open("wb") as file:
            for version in range(versions + 1):
                up_s = version * EVERY_S
                for line in lines(clients, version):
                    file.write(to_checksummed({"at": 1.7e9 + up_s, "up": up_s, **line}) + b"\n")
        size, begun = path.stat().st_size, time.perf_counter()
        with path.open("rb") as file:
            while file.read(1 << 20):
                pass
        read_s = time.perf_counter() - begun
        book, ledger = Book(StoreSettings().remembered_versions), Ledger(Files(), path)
        begun = time.perf_counter()
        ledger.open(book.apply)
        start_s = time.perf_counter() - begun
        ledger.close()
    assert book.version == versions
    row = {"bench": "ledger_start", "clients": clients, "versions": versions, "bytes": size}
    row |= {"start_s": round(start_s, 3), "read_s": round(read_s, 3)}
    row["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(json.dumps(row))


if __name__ == "__main__":
    main()
