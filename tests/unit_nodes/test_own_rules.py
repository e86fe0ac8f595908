"""Rules that an operator has written: loaded once, tried, and named with file and line."""

from pathlib import Path

import numpy as np
import pytest

from fsl_async.config.load import from_wire, load, to_wire
from fsl_async.config.recipes import with_implied
from fsl_async.errors import ConfigError
from fsl_async.nodes.ps.aggregation import check_aggregation, merging_of, rule_of
from fsl_async.nodes.ps.node import start_facts, store_settings_of
from fsl_async.nodes.ps.own_rules import keep_texts, with_base_rule

HEAD = """\
import numpy as np
from fsl_async.store.rules.adapters import FedIT, FlexLoRA
from fsl_async.store.rules import Channel, Rule
from fsl_async.store.rules.outer import OuterOptimizer
"""
MEAN = """\
class Mine(Rule):
    def combine(self, rows, clients, parts):
        return rows.mean(axis=0)
"""
MERGE = """\
class Mine(FlexLoRA):
    def merge(self, current, sites, scale, draw):
        return super().merge(current, sites[:1], scale, draw)
"""
EXAMPLES = Path(__file__).parents[2] / "examples" / "rules"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def started(key, code, *more):
    Path("mine.py").write_text(HEAD + code)
    config = with_implied(with_base_rule(load(None, [f"{key}=mine.py:Mine", *more])))
    check_aggregation(config)
    return config, store_settings_of(config)


AGGREGATION = [
    ("class Mine: pass", r"does not derive from fsl_async\.store\.rules\.Rule"),
    ("class Yours(Rule): pass", "there is no such class"),
    ("1 / 0", "importing it raised ZeroDivisionError at line 5"),
    ("class Mine(Rule): pass", "base.py:.*NotImplementedError|mine.py:.*NotImplementedError"),
    (MEAN.replace("rows.mean(axis=0)", "rows[1 // len(parts[9:])]"),
     "mine.py:7: in Mine.combine: ZeroDivisionError"),
    (MEAN.replace("rows.mean(axis=0)", "[c.metrics['loss'] for c in clients]"),
     "mine.py:7: in Mine.combine.*: KeyError: 'loss'"),
    (MEAN.replace("rows.mean", "rows.astype(float).mean"), r"mine.py:6: .*float64 \(2600,\), not"),
    (MEAN.replace("axis=0", "axis=1"), r"returns float32 \(1,\), not float32 \(2600,\)"),
    (MEAN.replace("rows.mean(axis=0)", "rows[0] * np.float32('nan')"), "is not finite"),
    (MEAN.replace("rows.mean(axis=0)", "None"), "it returns NoneType, not an array"),
    (MEAN.replace("rows.mean(axis=0)", "rows[0] + np.float32(np.random.random())"),
     "gives other values for the same rows"),
    (MEAN.replace("    def", "    out = np.zeros(2600, np.float32)\n    def")
     .replace("axis=0", "axis=0, out=self.out"), "returns memory that it uses again"),
    (MEAN.replace("def", "least = 0\n    def"), "least must be a whole number"),
    (MEAN.replace("def", "reuses = True\n    def"), "reuses false"),
]  # fmt: skip
STEP = """\
class Mine(OuterOptimizer):
    vectors = ("sum",)
    def step(self, average, state, numbers):
        state["sum"] += average
        return -average
"""
OPTIMIZER = [
    (STEP.replace("sum", "residual"), "'residual' must be .* and none of weights, residual"),
    (STEP.replace("sum", "Sum"), "'Sum' must be letters a-z and _"),
    (STEP.replace('("sum",)', '["sum"]'), "vectors must be a tuple of different names"),
    (STEP.replace("-average", "-average[1:]"), r"mine.py:7: .* \(2599,\), not float32 \(2600,\)"),
    (STEP.replace("-average", "average / 0"), "its result is not finite"),
    (STEP.replace("+= average", "/= 0"), r"state\['sum'\] is not finite"),
    (STEP.replace('["sum"] += average', '["sum"] = average'), "change the vectors of state"),
    (STEP.replace("-average", "average + state['all']"), "mine.py:9: in Mine.step: KeyError"),
    (STEP.replace("    def", "    n = 0\n    def").replace("return", "self.n += 1;return self.n*"),
     "step gives other values for the same average and state"),
    (STEP + "    def numbers(self, *given):\n        return 0.1", "returns 0.1, not an OuterStep"),
]  # fmt: skip
SEND = """\
class Mine(Channel):
    def begin(self, seed, version, sites):
        return np.array([name != "b" for name in sites])
    def transmit(self, vectors):
        return vectors.sum(axis=0) * np.float32(self.settings.snr_db / 10)
"""
CHANNEL = [
    ("class Mine: pass", r"does not derive from fsl_async\.store\.rules\.Channel"),
    ("class Mine(Channel): pass", "in Channel.transmit: NotImplementedError"),
    (SEND.replace("np.array(", "list("), r"in Mine.begin: it must return bool \(2,\)"),
    (SEND.replace("axis=0", "axis=1"), r"in Mine.transmit: it returns float32 \(1,\)"),
    (SEND.replace("/ 10)", "/ 0)"), "in Mine.transmit: ZeroDivisionError"),
    (SEND + "    power = float('nan')", "power must be a finite number"),
]
ADAPTERS = [
    ("class Mine(FedIT): pass", "must derive from a built-in rule that merges products: FedSVD"),
    (MERGE.replace("def", "unequal_ranks = False\n    def"), "unequal_ranks is what clients train"),
    (MERGE.replace("    def", "    def trains_a(self, v):\n        return v > 3\n    def"),
     "trains_a is what clients train"),
    (MERGE.replace("super()", "None"), "mine.py:7: in Mine.merge: AttributeError"),
    (MERGE.replace("return super()", "return 0 * super()"), "TypeError"),
    (MERGE.replace("return super()", "super()"), "it returns NoneType, not Merged"),
    (MERGE.replace("def", "keeps_owed = True\n    def"), "the rule must return owed"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "code", "words"),
    [
        *(("outer.aggregation", *one) for one in AGGREGATION),
        *(("outer.optimizer", *one) for one in OPTIMIZER),
        *(("outer.channel", *one) for one in CHANNEL),
        *(("tune.rule", *one) for one in ADAPTERS),
    ],
)
def test_what_is_wrong_with_a_rule_is_one_line_before_the_start(folder, key, code, words):
    """A rule that fails at the first merge costs a round of everybody's training."""
    more = ["tune.method=lora"] if key == "tune.rule" else []
    with pytest.raises(ConfigError, match=words) as caught:
        started(key, code, *more)
    assert "\n" not in caught.value.message
    assert caught.value.key in {key, "tune.merge"}
    assert caught.value.exit_code == 2


def test_a_rule_is_tried_with_the_settings_of_the_run(folder):
    """One that fails with these alone would fail at the first merge."""
    code = STEP.replace("-average", "-average / average.dtype.type(self.momentum)")
    started("outer.optimizer", code)
    with pytest.raises(ConfigError, match=r"in Mine\.step: its result is not finite"):
        started("outer.optimizer", code, "outer.momentum=0")


def test_an_own_aggregation_is_named_by_its_digest_and_reloaded_when_it_changes(folder):
    """Versions record which code has made them."""
    config, settings = started("outer.aggregation", MEAN)
    first = settings.rule_name
    assert first.startswith("Mine@")
    assert rule_of(config).name == first
    assert merging_of(config).compares
    facts = start_facts(config)["rules"]["outer.aggregation"]
    assert (facts["class"], facts["sha256"][:8]) == ("Mine", first.partition("@")[2])
    keep_texts(folder, config)
    (kept,) = (folder / "rules").iterdir()
    assert kept.read_text() == Path("mine.py").read_text()
    assert started("outer.aggregation", MEAN + "# more")[1].rule_name != first


def test_an_own_channel_gets_the_settings_of_the_air_and_is_named_by_its_digest(folder):
    """A radio test-bed plugs in by one class, and versions record which one delivered them."""
    config, settings = started("outer.channel", SEND, "air.snr_db=20")
    assert settings.rule_name.startswith("mean, Mine@")
    assert to_wire(config)["outer"]["channel"] == "own"
    channel = settings.channel
    assert list(channel.begin(1, 2, ("a", "b"))) == [True, False]
    assert (channel.transmit(np.ones((1, 3), np.float32)) == 2).all()
    assert started("outer.aggregation", MEAN)[1].channel is None


def test_an_own_merge_of_adapters_leaves_clients_the_built_in_rule(folder):
    """A parameter server must not choose code that runs on a client's machine."""
    config, settings = started("tune.rule", MERGE, "tune.method=lora")
    assert settings.product_rule.name.startswith("Mine@")
    wire = to_wire(config)
    assert wire["tune"]["rule"] == "flexlora"
    assert "merge" not in wire["tune"]
    aggregation, _ = started("outer.aggregation", MEAN)
    assert to_wire(aggregation)["outer"]["aggregation"] == "own"
    hostile = {"outer": {"aggregation": "/tmp/x.py:X"}, "tune": {"merge": "/tmp/x.py:X"}}
    assert from_wire(hostile).outer.aggregation == "own"
    assert not from_wire(hostile).tune.merge
    with pytest.raises(ConfigError, match="expected one of fedit"):
        from_wire({"tune": {"rule": "/tmp/x.py:X"}})


def test_a_rule_is_relative_to_the_file_that_names_it(folder):
    """As --set is to the current folder."""
    (folder / "sub").mkdir()
    (folder / "sub" / "mine.py").write_text(
        "from fsl_async.store.rules.aggregation import Rule\n" + MEAN
    )
    (folder / "sub" / "run.toml").write_text('[outer]\naggregation = "mine.py:Mine"\n')
    assert rule_of(load("sub/run.toml")).name.startswith("Mine@")
    with pytest.raises(ConfigError, match="no such file"):
        rule_of(load(None, ["outer.aggregation=mine.py:Mine"]))
    with pytest.raises(ConfigError, match=r"latest or file.py:Class, got \"meen\", did you mean"):
        load(None, ["outer.aggregation=meen"])
