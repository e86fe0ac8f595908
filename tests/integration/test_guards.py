"""One client sends false deltas to a real parameter server: their effect is bounded by `guard`
settings.

Clients are the light ones of the benchmarks: real sessions, streams and decisions, no training.
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
    """The modules of benchmarks/ that stand in for clients and start a parameter server."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import server_process
    import sync_clients

    yield server_process, sync_clients
    for name in ("server_process", "sync_clients"):
        sys.modules.pop(name, None)


class Warnings(list):
    """Warnings that a client received; always false, so that the liar goes on."""

    def __bool__(self):
        return False


def run_with_a_lie(bench, folder, *, count=3, **settings):
    """Run an honest round, a round with a lie, and an honest round.

    Returns the lines of ledger and journal, how far the model moved in each round, and the liar's
    warnings.
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
        # in the middle: rules must find it by its values, not its place
        liar = crowd.clients[count // 2]
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
        liar.problems = Warnings(liar.problems)
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
        moved, warnings = run(play(server.address))
        until = time.monotonic() + 60 * UNIT_S
        while '"version":3' not in (run_dir / "journal.jsonl").read_text().replace(" ", ""):
            assert time.monotonic() < until, "the journal ends before the last version"
            time.sleep(0.05)
        server.process.kill()  # it would wait for its clients, which have ended
    lines = {
        name: [json.loads(line) for line in (run_dir / f"{name}.jsonl").read_text().splitlines()]
        for name in ("ledger", "journal")
    }
    return lines, moved, warnings


def of(lines, fact):
    """The ledger's lines of one kind."""
    return [line for line in lines["ledger"] if line["fact"] == fact]


def notes(lines, words):
    """Return the journal's notes that contain these words."""
    return [line for line in lines["journal"] if words in line.get("text", "")]


def weights(lines, version):
    """Return the weight of each client's delta in a version."""
    (found,) = [line for line in of(lines, "version") if line["version"] == version]
    return {one["key"].split("/")[0]: one["weight"] for one in found["merged"]}


def test_without_rules_a_lie_has_its_full_effect(bench, tmp_path):
    """The reference for the tests below: the lie has its full effect, in values and in tokens."""
    rules = {"guard__clip_median": 0.0, "guard__max_tokens_median": 0.0, "guard__max_share": 0.0}
    lines, moved, _ = run_with_a_lie(bench, tmp_path, **rules)
    assert moved[1] > 900 * moved[0]
    assert weights(lines, 2)["client-01"] == TIMES * weights(lines, 2)["client-00"]
    assert of(lines, "quarantined") == []


def test_an_outlier_is_clipped_and_its_tokens_capped(bench, tmp_path):
    """By default its norm is clipped to 1.5 times the median; its tokens here to the median.

    As the ledger records.
    """
    lines, moved, warnings = run_with_a_lie(bench, tmp_path, guard__max_tokens_median=1.0)
    assert moved[0] == pytest.approx(DELTA, rel=1e-3)
    assert moved[1] == pytest.approx(DELTA * 3.5 / 3, rel=1e-3), (
        "two honest deltas and one of 1.5 times their size"
    )
    assert moved[2] == pytest.approx(DELTA, rel=1e-3), "the next round is as the first"
    found = weights(lines, 2)
    assert found["client-01"] == pytest.approx(found["client-00"] * 1.5 / TIMES)
    merged = [one for line in of(lines, "version") for one in line["merged"]]
    assert len({one["tokens"] for one in merged}) == 1
    assert notes(lines, "client-01's delta of norm")
    assert notes(lines, "tokens that client-01 claims count")
    assert not warnings


def test_an_outlier_is_quarantined(bench, tmp_path):
    """It is recorded with a reason that its client receives; the others make the version; it goes
    on.
    """
    lines, moved, warnings = run_with_a_lie(
        bench, tmp_path, guard__outlier_median=5.0, guard__least=3
    )
    assert moved == pytest.approx([DELTA] * 3, rel=1e-3)
    (out,) = of(lines, "quarantined")
    assert out["key"].startswith("client-01/")
    assert "above 5 x the median" in out["reason"]
    assert len(list((tmp_path / "run" / "quarantine").iterdir())) > 0
    assert set(weights(lines, 2)) == {"client-00", "client-02"}
    assert set(weights(lines, 3)) == {"client-00", "client-01", "client-02"}
    assert notes(lines, "quarantined delta client-01/")
    assert any("above 5 x the median" in text for text in warnings)


def test_a_set_norm_clips_without_a_history(bench, tmp_path):
    """`clip_norm` is absolute: it holds from the first delta on, whatever tokens are claimed."""
    norm = DELTA * VALUES**0.5
    lines, moved, _ = run_with_a_lie(
        bench,
        tmp_path,
        guard__clip_norm=2 * norm,
        guard__clip_median=0.0,
        sync__weighting="uniform",
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
def test_a_robust_rule_ignores_one_liar(bench, tmp_path, rule, count):
    """A robust rule needs no history of norms: it ignores the first lie too."""
    lines, moved, _ = run_with_a_lie(bench, tmp_path, count=count, outer__aggregation=rule)
    assert moved == pytest.approx([DELTA] * 3, rel=1e-3)
    names = {f"client-{number:02}" for number in range(count)}
    for version in (1, 2, 3):
        assert set(weights(lines, version)) == names, "every client is in the ledger"
    if rule == "multi-krum":
        chosen = {name for name, weight in weights(lines, 2).items() if weight > 0}
        assert len(chosen) == 2
        assert "client-02" not in chosen
