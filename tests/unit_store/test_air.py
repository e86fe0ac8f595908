"""Deltas that a radio channel adds up: its arithmetic, and versions made of what it delivers."""

import json
import math

import numpy as np
import pytest
from adapter_runs import model
from attrs import evolve
from deltas import delta_of, merged_of

from fsl_async.config.settings import AirConfig
from fsl_async.roles.sync.delta import DeltaKey
from fsl_async.store.deltas.delta_kind import Seeds
from fsl_async.store.deltas.seed_step import Directions
from fsl_async.store.errors import ManifestError
from fsl_async.store.model.manifest import Manifest
from fsl_async.store.rules.adapters import RULES
from fsl_async.store.rules.air import Air, Channel, inverted_power
from fsl_async.store.rules.outer import Average
from fsl_codecs import CodecSpec, encode_seeds

CHUNK = 64
CLEAR = AirConfig(snr_db=200, rician_k=1e6)
"""No noise and no fading: no site is left out."""
SITES = [f"site-{number:02}" for number in range(20)]
MANIFEST = Manifest.from_shapes([("head.weight", (20, 8)), ("head.bias", (9,))])
FP32 = CodecSpec(format="fp32")


def vectors(count, values=20_000):
    """Vectors of sites, of unlike sizes, the largest with a root mean square of 1."""
    made = np.random.default_rng(1).standard_normal((count, values)).astype(np.float32)
    made *= np.linspace(0.2, 1.0, count, dtype=np.float32)[:, None]
    return made / np.sqrt((made[-1] ** 2).mean())


def heard(air, version=1, rows=None):
    """Return which sites send, their rows, and the sum that the channel delivers."""
    rows = vectors(len(SITES)) if rows is None else rows
    sends = air.begin(7, version, SITES)
    return sends, rows[sends], air.transmit(rows[sends].copy())


def test_without_noise_the_channel_delivers_the_sum_of_those_that_send():
    """Whatever the paths and the floor are: inversion cancels them."""
    for rician_k in (0.0, 3.0, 1e6):
        air = Air(AirConfig(snr_db=200, rician_k=rician_k))
        sends, rows, total = heard(air)
        assert sends.sum() == 20 if rician_k > 1e3 else 10 < sends.sum() <= 20
        assert abs(total - rows.sum(axis=0, dtype=np.float64)).max() < 1e-6 * abs(total).max()


@pytest.mark.parametrize("snr_db", [0, 10, 20])
def test_the_error_has_no_bias_and_the_variance_of_the_formula(snr_db):
    """r^2 P / (snr rho m^2) a value of the mean, with r and P of 1."""
    air, errors, wanted = Air(AirConfig(snr_db=snr_db)), [], 0.0
    for version in range(1, 11):
        sends, rows, total = heard(air, version)
        errors.append((total - rows.sum(axis=0, dtype=np.float64)) / sends.sum())
        wanted += 10 ** (-snr_db / 10) / (0.1 * sends.sum() ** 2) / 10
    error = np.concatenate(errors)
    assert error.var() == pytest.approx(wanted, rel=0.05)
    assert abs(error.mean()) < 4 * math.sqrt(wanted / len(error))


@pytest.mark.parametrize("estimate_error", [0.0, 0.3])
def test_by_the_peak_rule_no_site_ever_sends_above_p(estimate_error):
    """A site that takes a good path for a deep fade would send 200 P, were it not for the floor."""
    air, largest = Air(AirConfig(estimate_error=estimate_error)), 0.0
    rows = np.ones((len(SITES), 4), np.float32)
    for version in range(500):
        heard(air, version, rows)
        largest = max(largest, air.power)
    assert 0.9 < largest <= 1.0 + 1e-12


def test_by_the_mean_rule_power_is_p_on_average_and_more_in_a_fade():
    """The power that arrives is P / E1(g) in Rayleigh fading: E1(0.1) is 1.8229."""
    air = Air(AirConfig(power="mean"))
    assert inverted_power(air.settings) == pytest.approx(1 / 1.8229, rel=3e-3)
    assert inverted_power(AirConfig(power="mean", rician_k=1e6)) == pytest.approx(1, rel=3e-3)
    total, largest = 0.0, 0.0
    for version in range(600):
        air.begin(7, version, SITES)
        total += air._powers.sum()
        largest = max(largest, air._powers.max())
    assert total / (600 * len(SITES)) == pytest.approx(1, rel=0.03)
    assert 4.6 < largest < 5.6


def test_a_share_of_exp_minus_g_sends():
    """Truncation leaves out the sites in a fade, and no others."""
    air = Air(AirConfig())
    sent = sum(air.begin(7, version, SITES).sum() for version in range(1000))
    assert sent / (1000 * len(SITES)) == pytest.approx(math.exp(-0.1), rel=0.01)


def test_a_late_site_adds_part_of_the_neighboring_values():
    """Half a symbol at most: the energy of one value lands in two."""
    air = Air(evolve(CLEAR, timing_error=0.5))
    row = np.zeros((1, 9), np.float32)
    row[0, 4] = 1.0
    found = []
    for version in range(40):
        air.begin(7, version, ["a"])
        total = air.transmit(row.copy())
        assert total.sum() == pytest.approx(1, abs=1e-6)
        found.append(total)
    early, here, late = np.array(found)[:, 3:6].T
    assert early.max() > 0.2
    assert late.max() > 0.2
    assert 0.5 <= here.min() + 1e-6 < here.max() < 1
    assert not (np.minimum(early, late) > 1e-6).any()


def test_the_chance_of_a_round_follows_from_seed_version_and_names():
    """A replay on another machine begins with the same key."""
    total = heard(Air(AirConfig()))[2].tobytes()
    assert heard(Air(AirConfig()))[2].tobytes() == total
    assert heard(Air(AirConfig()), version=2)[2].tobytes() != total
    alone = Air(AirConfig())
    all_of_them = dict(zip(SITES, Air(AirConfig()).begin(7, 3, SITES), strict=True))
    assert alone.begin(7, 3, SITES[4:5]) == [all_of_them[SITES[4]]]


# --- versions ---


class Radio(Channel):
    """A test-bed: it never delivers the same sum twice."""

    name = "radio"
    rng = np.random.default_rng(0)

    def transmit(self, vectors):
        """Return the sum with other noise each time."""
        noise = 0.1 * self.rng.standard_normal(vectors.shape[1])
        return vectors.sum(axis=0) + noise.astype(np.float32)


def run_of(make_run, channel=None, **options):
    usual = {"outer": Average(), "codec_down": FP32, "adapter_seed": 7, "keep_versions": 2}
    return make_run(manifest=MANIFEST, channel=channel, **(usual | options))


def received(run):
    lines = (run.root / "ledger.jsonl").read_text().splitlines()
    return [fact for fact in map(json.loads, lines) if fact["fact"] == "received"]


def test_a_clear_channel_makes_the_version_of_the_mean(make_run):
    """Weights by tokens hold over the air too."""
    made = []
    for name, channel in (("plain", None), ("air", Air(CLEAR))):
        run = run_of(make_run, channel, name=name)
        run.start()
        keys = [DeltaKey(one, 1, 0, 1) for one in "abc"]
        for number, key in enumerate(keys):
            run.send(key, run.noise(number), tokens=10 * (number + 1))
        merged = [merged_of(key, 10.0 * n, tokens=10 * n) for n, key in enumerate(keys, 1)]
        run.store.commit(1, merged, 1 / 60)
        made.append(run.weights(1))
    assert abs(made[0] - made[1]).max() < 1e-6
    (line,) = received(run)
    assert (line["senders"], line["uses"], line["snr_db"]) == (list("abc"), MANIFEST.values, 200)
    assert 0 < line["power"] <= 1


def test_uses_do_not_depend_on_the_number_of_sites_and_who_faded_has_no_weight(make_run):
    """All send at once. What is below the floor is lost, and on record."""
    run = run_of(make_run, Air(AirConfig(gain_floor=0.7)))
    run.start()
    for version, names in enumerate(["ab", "abcdefgh"], 1):
        run.round(version, *names)
    assert [line["uses"] for line in received(run)] == [MANIFEST.values] * 2
    for line, record in zip(received(run), run.store.records[1:], strict=True):
        weighted = [one.key.client for one in record.merged if one.weight]
        assert weighted == line["senders"]
        assert record.rule == "mean, air"
        assert record.cosine is None
    assert 0 < len(received(run)[1]["senders"]) < received(run)[1]["sites"] == 8


def test_a_round_in_which_all_sites_fade_changes_nothing(make_run):
    """Its deltas are merged, without weight: they are lost, as the guide says."""

    class Silent(Air):
        def begin(self, seed, version, sites):
            return super().begin(seed, version, sites) & False

    run = run_of(make_run, Silent(AirConfig()))
    run.start()
    before = run.weights(0)
    run.round(1, "a", "b")
    assert (run.weights(1) == before).all()
    assert received(run)[0]["senders"] == []


def test_a_factor_that_rests_is_not_sent(make_run):
    """In rolora one factor trains in a round. The other takes no uses, and no noise."""
    manifest, rule = model("rolora"), RULES["rolora"]()
    run = run_of(make_run, Air(AirConfig(snr_db=0)), adapters=rule)
    run.manifest = manifest
    run.start()
    resting = np.zeros(manifest.values, bool)
    for tensor in manifest.tensors:
        is_a = tensor.name.endswith(".lora_A")
        if (is_a and not rule.trains_a(0)) or (
            tensor.name.endswith("lora_B") and not rule.trains_b(0)
        ):
            resting[tensor.offset : tensor.offset + math.prod(tensor.shape)] = True
    keys = [DeltaKey(one, 1, 0, 1) for one in "abc"]
    for number, key in enumerate(keys):
        run.send(key, np.where(resting, 0, run.noise(number)).astype(np.float32))
    before = run.weights(0)
    run.commit(*keys)
    assert 0 < resting.sum() < manifest.values
    assert ((run.weights(1) == before) == resting).all()
    assert received(run)[0]["uses"] == manifest.values - resting.sum()


def test_scalars_of_zeroth_order_come_by_the_channel_too(make_run):
    """Six uses a round, whatever the model's size."""
    directions, made = Directions(seed=5, steps=2, probes=3, rate=1e-2), []
    for name, channel in (("plain", None), ("air", Air(CLEAR))):
        run = run_of(make_run, channel, name=name, kind=Seeds(directions), history=5)
        run.start()
        keys = [DeltaKey(one, 1, 0, 1) for one in "ab"]
        for number, key in enumerate(keys):
            scalars = np.random.default_rng(number).standard_normal((1, 2, 3)).astype(np.float32)
            run.store.spool_begin(delta_of(key, number=1))
            run.store.spool_write(key, 0, encode_seeds(0, scalars))
            run.store.spool_finish(key)
        run.commit(*keys)
        made.append(run.weights(1))
    assert abs(made[0] - made[1]).max() < 1e-6
    assert received(run)[0]["uses"] == 6


def test_a_model_with_buffers_is_refused_in_one_line(make_run):
    """No channel averages statistics of batch norm exactly."""
    run = run_of(make_run, Air(AirConfig()))
    run.open()
    with pytest.raises(ManifestError, match=r"set exchange\.buffers = none"):
        run.store.begin_initial(Manifest.from_shapes([("w", (9,))], [("mean", (3,))]))


# --- kills ---

LAST = 3


def to_the_end(run):
    """Make the versions up to LAST, from any state; return the digest of the last."""
    if run.store.version < 0:
        run.publish()
    while run.store.version < LAST:
        base = run.store.version
        keys = [DeltaKey(name, 1, base, base + 1) for name in "abc"]
        for number, key in enumerate(keys):
            if run.store.known(key) is None:
                run.send(key, run.noise(100 * base + number))
        run.commit(*keys)
    return run.store.digest


@pytest.mark.parametrize(("mode", "power"), [("torn", None), ("after", "all"), ("error", None)])
def test_a_kill_anywhere_makes_the_same_versions(make_run, mode, power):
    """Between the call, the kept sum, its line and the version: lost 0, doubled 0, same bits."""
    run = run_of(make_run, Air(AirConfig(snr_db=0)))

    def play(files):
        run.open(files)
        to_the_end(run)

    digests, kept, deaths = set(), 0, 0
    for found in run.deaths(play, mode=mode, powers=(power,)):
        facts = run.facts() if found.version >= 0 else []
        lines = [fact["version"] for fact in facts if fact["fact"] == "received"]
        kept += found.version + 1 in lines
        digests.add(to_the_end(run))
        keys = [one["key"] for fact in run.facts() if fact["fact"] == "version"
                for one in fact["merged"]]  # fmt: skip
        assert len(keys) == len(set(keys)) == 3 * LAST
        deaths += 1
    assert len(digests) == 1
    assert kept > 2
    assert deaths > 60


def test_a_sum_that_was_received_is_not_asked_for_again(make_run):
    """A radio does not deliver the same sum twice: the version is made of the one on record."""
    run, rounds = run_of(make_run, Radio(AirConfig()), snapshot_every=10), 0

    def play(files):
        run.open(files)
        to_the_end(run)

    for found in run.deaths(play):
        if found.version < 0:
            continue
        before = [fact for fact in run.facts() if fact["fact"] == "received"]
        is_kept = bool(before) and before[-1]["version"] == found.version + 1
        to_the_end(run)
        after = [fact["version"] for fact in run.facts() if fact["fact"] == "received"]
        rounds += is_kept
        if is_kept:
            assert after == [one["version"] for one in before] + list(
                range(found.version + 2, LAST + 1)
            )
        # Versions are made again from the kept sums, to the digests that were announced.
        assert run.open(run.files).digest == run.store.digest
        assert run.store.verify(LAST)
    assert rounds > 2


def test_a_round_of_other_deltas_is_sent_again(make_run):
    """After a restart a round may be of more sites: a sum of fewer must not stand for it."""
    run = run_of(make_run, Air(CLEAR))
    run.start()
    keys = [DeltaKey(one, 1, 0, 1) for one in "abc"]
    for number, key in enumerate(keys):
        run.send(key, run.noise(number))
    merging = run.store._merging
    few = [merged_of(key, 10.0) for key in keys[:2]]
    made = merging._make
    merging._make = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        run.store.commit(1, few, 1 / 20)
    merging._make = made
    run.open()
    run.commit(*keys)
    assert [len(line["senders"]) for line in received(run)] == [2, 3]
    mean = np.mean([run.noise(number) for number in range(3)], axis=0)
    assert abs(run.weights(0) - run.weights(1) - mean).max() < 1e-6


def test_after_a_rollback_the_channel_is_used_again(make_run):
    """The sum of a version that is void must not be taken for that of the new one."""
    run = run_of(make_run, Air(AirConfig()))
    run.start()
    run.round(1, "a", "b")
    first = run.round(2, "a", "b")
    run.open(from_version=1)
    assert run.store.version == 1
    keys = [DeltaKey(one, 1, 1, 2) for one in "ab"]
    assert run.commit(*keys).digest == first.digest
    assert [line["version"] for line in received(run)] == [1, 2, 2]


def test_sums_that_no_replay_needs_are_removed(make_run):
    """The folder does not grow with the run."""
    run = run_of(make_run, Air(AirConfig()), snapshot_every=1)
    run.start()
    for version in range(1, 9):
        run.round(version, "a", "b")
    assert len(list((run.root / "sums").iterdir())) <= 5
