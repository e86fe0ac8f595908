"""One of the clients lies, to a real server over real sockets: what its lie is worth is what the
settings say, and the run goes on.

Clients are the light ones of the benchmarks (real sessions, streams and decisions; nobody trains),
so that a lie is a line here.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from fsl_codecs import CodecSpec, encode
from fsl_transport.loop import run

pytestmark = pytest.mark.slow
UNIT_S = float(os.environ.get("FSL_TEST_TIME_UNIT", "3"))
EVERY_S = 0.3
TIMES = 1000
VALUES = 1000
DELTA = 0.01


@pytest.fixture
def bench(monkeypatch):
    """The modules of benchmarks/ that play clients and start a server."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import server_process
    import sync_clients

    yield server_process, sync_clients
    for name in ("server_process", "sync_clients"):
        sys.modules.pop(name, None)


class Told(list):
    """What a client was warned of; for the liar no reason to give up."""

    def __bool__(self):
        return False


def played(bench, folder, *, count=3, **settings):
    """An honest round, one with a lie, and one more; lines of ledger and journal, how far the model
    moved in each, what the liar was told.
    """
    from fsl_async.store.manifest import Manifest

    server_process, sync_clients = bench
    spec = CodecSpec(format="fp32")
    chosen = {
        "sync.every_s": EVERY_S,
        "sync.quorum": 1.0,
        "sync.clients": count,
        "outer.optimizer": "average",
        "codec.down": "fp32",
        **{name.replace("__", "."): value for name, value in settings.items()},
    }

    async def play(address):
        model = sync_clients.SharedModel(Manifest.from_shapes([("w", (VALUES,))]), spec)
        model.delta[0] = encode(np.full(VALUES, DELTA, np.float32), spec)
        crowd = sync_clients.Crowd(model, address, count, EVERY_S)
        liar = crowd.clients[count // 2]  # not at an end: rules must find it by what it says
        moved = []
        try:
            await crowd.start()
            for version, is_lie in ((1, False), (2, True), (3, False)):
                before = model.base.copy()
                lie(liar, model, sync_clients, times=TIMES if is_lie else 1)
                await crowd.sync(version)
                moved.append(float(np.abs(before - model.base).max()))
            return moved, [str(text) for text in liar.problems]
        finally:
            await crowd.close()

    def lie(liar, model, clients, times):
        own = clients.SharedModel(model.manifest, spec)
        own.delta[0] = encode(np.full(VALUES, times * DELTA, np.float32), spec)
        own.crcs = model.crcs
        liar.problems = Told(liar.problems)
        liar.learner._model = own

        def request_snapshot(sequence, *, hold=False):
            from fsl_async.roles.sync import events as ev

            work, liar.work = liar.work, False
            tokens = clients.TOKENS * times if work else 0
            liar.answered_at = clients.time.monotonic()
            base = liar.learner.base_version
            liar.feed_soon(ev.Snapshotted(sequence, base, tokens, clients.STEPS if work else 0))
            liar.changed()

        liar.learner.request_snapshot = request_snapshot

    run_dir = folder / "run"
    with server_process.serving(run_dir, chosen) as server:
        moved, told = run(play(server.address))
        until = time.monotonic() + 60 * UNIT_S
        while '"version":3' not in (run_dir / "journal.jsonl").read_text().replace(" ", ""):
            assert time.monotonic() < until, "the journal ends before the last version"
            time.sleep(0.05)
        server.process.kill()  # its clients are gone: it would wait for them
    lines = {
        name: [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]
        for name in ("ledger", "journal")
    }
    return lines, moved, told


def of(lines, fact):
    """The ledger's lines of one kind."""
    return [line for line in lines["ledger"] if line["fact"] == fact]


def notes(lines, words):
    """What the server told its operator that has these words."""
    return [line for line in lines["journal"] if words in line.get("text", "")]


def weights(lines, version):
    """What each client's delta counted for."""
    (found,) = [line for line in of(lines, "version") if line["version"] == version]
    return {one["key"].split("/")[0]: one["weight"] for one in found["merged"]}


def test_without_rules_a_liar_has_its_way(bench, tmp_path):
    """What the other tests of this file are measured by: the lie arrives whole, in values and in
    tokens.
    """
    lines, moved, _ = played(bench, tmp_path)
    assert moved[1] > 900 * moved[0]
    assert weights(lines, 2)["client-01"] == TIMES * weights(lines, 2)["client-00"]
    assert of(lines, "quarantined") == []


def test_what_is_absurd_is_clipped_and_capped(bench, tmp_path):
    """It counts as twice what is usual, for the tokens that are usual; the books say so, and it is
    one of the three all the same.
    """
    lines, moved, told = played(
        bench, tmp_path, guard__clip_median=2.0, guard__least=3, guard__max_tokens_median=1.0
    )
    assert moved[0] == pytest.approx(DELTA, rel=1e-3)
    assert moved[1] == pytest.approx(DELTA * 4 / 3, rel=1e-3), "two honest ones and one of twice"
    assert moved[2] == pytest.approx(DELTA, rel=1e-3), "the next round is as ever"
    found = weights(lines, 2)
    assert found["client-01"] == pytest.approx(found["client-00"] * 2 / TIMES)
    assert len({line["tokens"] for line in of(lines, "accepted")}) == 1
    assert notes(lines, "tokens that client-01 claims count")
    assert not told


def test_an_outlier_is_quarantined(bench, tmp_path):
    """Kept aside with the reason, on record and told to its client; the two others make the
    version, and it may go on.
    """
    lines, moved, told = played(bench, tmp_path, guard__outlier_median=5.0, guard__least=3)
    assert moved == pytest.approx([DELTA] * 3, rel=1e-3)
    (out,) = of(lines, "quarantined")
    assert out["key"].startswith("client-01/")
    assert "above 5 x the median" in out["reason"]
    assert len(list((tmp_path / "run" / "quarantine").iterdir())) > 0
    assert set(weights(lines, 2)) == {"client-00", "client-02"}
    assert set(weights(lines, 3)) == {"client-00", "client-01", "client-02"}
    assert notes(lines, "quarantined delta client-01/")
    assert any("above 5 x the median" in text for text in told)


def test_a_norm_that_is_set_clips_without_a_memory(bench, tmp_path):
    """`clip_norm` is for who knows what is usual: it holds from the first delta on, for one with no
    lie about its tokens too.
    """
    norm = DELTA * VALUES**0.5
    lines, moved, _ = played(
        bench, tmp_path, guard__clip_norm=2 * norm, guard__least=64, sync__weighting="uniform"
    )
    assert moved == pytest.approx([DELTA, DELTA * 4 / 3, DELTA], rel=1e-3)
    found = weights(lines, 2)
    assert found["client-01"] == pytest.approx(found["client-00"] * 2 / TIMES, rel=1e-3)
    assert of(lines, "quarantined") == []


@pytest.mark.parametrize(
    ("rule", "count"),
    [
        pytest.param("median", 3, marks=pytest.mark.sweep),
        pytest.param("trimmed", 3, marks=pytest.mark.sweep),
        ("multi-krum", 5),
    ],
)
def test_a_robust_rule_does_not_hear_one_liar(bench, tmp_path, rule, count):
    """A rule of aggregation needs no memory of what is usual: the first lie is as little worth as
    the tenth.
    """
    lines, moved, _ = played(bench, tmp_path, count=count, outer__aggregation=rule)
    assert moved == pytest.approx([DELTA] * 3, rel=1e-3)
    names = {f"client-{number:02}" for number in range(count)}
    for version in (1, 2, 3):
        assert set(weights(lines, version)) == names, "everybody is on record"
    if rule == "multi-krum":
        chosen = {name for name, weight in weights(lines, 2).items() if weight > 0}
        assert len(chosen) == 2
        assert "client-02" not in chosen
