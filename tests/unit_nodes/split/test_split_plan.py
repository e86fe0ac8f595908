"""A real run sends what `fsl-node plan` says, to the byte."""

from collections import Counter

import pytest

from fsl_async.accounting.sizes import Category
from fsl_async.learn.split.build import shapes_of
from fsl_async.plan.link import parse_link
from fsl_async.plan.methods import Workload
from fsl_async.plan.report import make_plan

ROUNDS = 3
MODELS = {
    "gpt": ["model.family=gpt"],
    "cnn": [
        "model.family=small-cnn",
        "model.sizes=width=4",
        "data.sample_shape=1x8x8",
        "data.classes=10",
    ],
}
CASES = {
    "sl": [],
    "sl-u": [],
    "splitfed-v1": [],
    "splitfed-v2": [],
    "cse-fsl": [],
    "fsl-sage": ["split.align_every=1"],
    "fsl-sage lazy": ["split.align_every=2"],
    "fedavg": [],
}


@pytest.mark.parametrize(
    ("case", "model"),
    [
        pytest.param(
            case, model, marks=() if model == "gpt" or case == "fsl-sage" else pytest.mark.sweep
        )
        for case in CASES
        for model in MODELS
    ],
)
def test_measured_payload_is_the_plans(case, model, *, nodes, configured, text, images):
    """The planner is exact to the byte.

    Values in the wire's format, labels, weights.
    """
    method = case.split()[0]
    relay = method in {"sl", "sl-u"}
    config = configured(
        f"split.method={'sl' if relay else method}",
        f"split.labels_at_home={'true' if method == 'sl-u' else 'false'}",
        # at their own pace clients need not wait for the last round's auxiliary model
        f"split.mode={'lockstep' if method == 'fsl-sage' else 'free'}",
        "split.up=bf16",
        "split.down=bf16",
        # in a relay a version is one client's turn
        f"run.rounds={2 * ROUNDS if relay else ROUNDS}",
        f"data.path={text if model == 'gpt' else images()}",
        *MODELS[model],
        *CASES[case],
    )
    shapes = shapes_of(config)
    split = config.split
    work = Workload(2, 4, split.samples, split.upload_every, split.align_every)
    plan = make_plan(
        method=method, shapes=shapes, work=work, link=parse_link("1gbit,1ms"), number_format="bf16"
    )
    wanted = Counter({" ".join(key): size.payload for key, size in plan.total(ROUNDS).items()})
    for flow in plan.first:
        # the first client publishes version 0; the other one downloads it
        wanted[f"{flow.category} up"] += flow.size.payload
        wanted[f"{flow.category} down"] += flow.size.payload
    wanted[f"{Category.CLIENT_MODEL} down"] += plan.last_size.payload
    wanted = +wanted
    run = nodes(config)
    found = Counter()
    for name in run.names:
        found.update(run.summaries[name].traffic["payload"])
    assert found == wanted
    assert min(run.summaries[run.names[0]].traffic["sockets"].values()) > 0
    if method != "fedavg":
        crossing = run.summaries["server"].traffic["payload"]
        assert crossing == {key: found[key] for key in crossing}
        assert sum(crossing.values()) > 0
