"""The planner's arithmetic: published figures, both accountings, links, memory, bad input."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsl_async import cli
from fsl_async.accounting.sizes import FORMATS, Category, Direction, Kind
from fsl_async.commands.plan import TEXT_BATCH
from fsl_async.config.load import load
from fsl_async.errors import UsageError
from fsl_async.plan.link import LinkSpec, parse_link
from fsl_async.plan.methods import ALL_METHODS, PLANNED, Workload, trained
from fsl_async.plan.report import GIB, as_dict, as_text, make_plan
from fsl_async.plan.shapes import RESNET_CUTS, find_shapes

# FSL-SAGE (ICML 2025, arXiv:2505.23182): GiB until 81 % on CIFAR-10 and 50 % on CIFAR-100, with the
# implied rounds. None: not reached within the budget of 200 GiB.
PUBLISHED = [
    ("resnet18-cifar10", "fsl-sage", 89, "12.20"),
    ("resnet18-cifar10", "cse-fsl", 91, "26.02"),
    ("resnet18-cifar10", "splitfed-v1", 74, "60.23"),
    ("resnet18-cifar10", "fedavg", 84, "70.04"),
    ("resnet18-cifar10", "splitfed-v2", 134, "109.07"),
    ("resnet18-cifar100", "fsl-sage", 98, "13.45"),
    ("resnet18-cifar100", "cse-fsl", 91, "26.18"),
    ("resnet18-cifar100", "splitfed-v1", 59, "48.02"),
    ("resnet18-cifar100", "fedavg", None, "not reached"),
    ("resnet18-cifar100", "splitfed-v2", None, "not reached"),
]
BUDGET_GIB = 200
PUBLISHED_SETUP = Workload(clients=10, batch=256, samples=5000, upload_every=5, align_every=10)
SMALL = Workload(clients=3, batch=4, samples=18, upload_every=2, align_every=3)
LINK = LinkSpec(1e6, 0.5)


def plan(method, model="gpt-0.5m", work=SMALL, **how):
    return make_plan(method=method, shapes=find_shapes(model), work=work, link=LINK, **how)


def payloads(flows):
    return {(str(f.category), str(f.direction)): f.size.payload for f in flows}


@pytest.mark.parametrize(("model", "method", "rounds", "figure"), PUBLISHED)
def test_the_published_figures_come_out_to_two_decimals(model, method, rounds, figure):
    """An error in a formula, a shape or a schedule changes at least one of ten figures."""
    made = plan(method, model, PUBLISHED_SETUP, as_published=True)
    if rounds is None:
        # The rounds are unknown; the shapes give how many fit into the budget.
        whole_rounds = {"fedavg": 238, "splitfed-v2": 245}[method]
        before, after = (made.total_size(n).coded / GIB for n in (whole_rounds, whole_rounds + 1))
        assert before < BUDGET_GIB < after
        return
    spent = made.total_size(rounds).coded / GIB
    assert f"{spent:.2f}" == figure
    assert spent < BUDGET_GIB


def test_the_published_sizes_of_the_parts():
    """The figures above depend on these three numbers, counters included."""
    found = find_shapes("resnet18-cifar10")
    sizes = [4 * p.values + 8 * p.counters for p in (found.client, found.server, found.auxiliary)]
    assert sizes == [2_740_048, 42_025_080, 8_419_408]
    assert found.cut_values == 2048


def test_what_our_accounting_counts_and_the_published_one_does_not():
    """The two accountings differ in labels, counters and the first download, and only there."""
    ours = plan("cse-fsl", "resnet18-cifar10", PUBLISHED_SETUP, number_format="fp32")
    theirs = plan("cse-fsl", "resnet18-cifar10", PUBLISHED_SETUP, as_published=True)
    a, b = payloads(ours.flows), payloads(theirs.flows)
    assert a.pop(("labels", "up")) == 4 * 256
    assert b.pop(("labels", "up")) == 0
    assert a["activations", "up"] == b["activations", "up"] == 4 * 256 * 8192
    found = ours.shapes
    for key, part in (("client model", found.client), ("auxiliary", found.auxiliary)):
        for way in ("up", "down"):
            assert b[key, way] - a[key, way] == 8 * part.counters > 0
    assert ours.first_size.payload == 10 * 4 * (found.client.values + found.auxiliary.values)
    assert theirs.first_size.payload == 0


@pytest.mark.parametrize("method", ["sl", "splitfed-v1", "splitfed-v2"])
def test_methods_that_exchange_every_sample(method):
    """Each sample crosses the cut once each way, and the client's part goes up and comes down."""
    made = plan(method, number_format="fp32")
    found = made.shapes
    part = 4 * found.client.values
    assert payloads(made.flows) == {
        ("activations", "up"): 18 * found.cut_values * 4,
        ("labels", "up"): 18 * 128,
        ("gradients", "down"): 18 * found.cut_values * 4,
        ("client model", "up"): part,
        ("client model", "down"): part,
    }
    assert payloads(made.first) == {("client model", "down"): part}
    # After the last turn of a sequential run all clients but one lack its weights.
    clients = made.work.clients
    assert made.last_size.payload == (part * (clients - 1) if method == "sl" else 0)


def test_u_shaped_sends_no_labels_and_crosses_four_times():
    """Labels stay at home; instead there is a second cut, and the tail moves with the part."""
    made = plan("sl-u", "resnet18-cifar10", number_format="fp32")
    found = made.shapes
    moved = 4 * (found.client.values + found.tail.values)
    assert payloads(made.flows) == {
        ("activations", "up"): 18 * found.cut_values * 4,
        ("gradients", "up"): 18 * found.tail_values * 4,
        ("activations", "down"): 18 * found.tail_values * 4,
        ("gradients", "down"): 18 * found.cut_values * 4,
        ("client model", "up"): moved,
        ("client model", "down"): moved,
    }


def test_methods_with_an_auxiliary_model():
    """FSL-SAGE sends no auxiliary model up, and one down only every third round."""
    # 18 samples in batches of 4 are 5 steps; steps 0, 2 and 4 upload, the last of them 2 samples.
    uploaded = 10
    cse, sage = plan("cse-fsl", number_format="fp32"), plan("fsl-sage", number_format="fp32")
    found = cse.shapes
    auxiliary, part = 4 * found.auxiliary.values, 4 * found.client.values
    common = {
        ("activations", "up"): uploaded * found.cut_values * 4,
        ("labels", "up"): uploaded * 128,
        ("client model", "up"): part,
        ("client model", "down"): part,
    }
    both = {("auxiliary", "up"): auxiliary, ("auxiliary", "down"): auxiliary}
    assert payloads(cse.flows) == {**common, **both}
    assert payloads(sage.flows) == {**common, ("auxiliary", "down"): auxiliary}
    aligned = Category.AUXILIARY, Direction.DOWN
    counts = [sage.total(rounds)[aligned].payload // auxiliary // 3 for rounds in range(8)]
    assert counts == [0, 1, 1, 1, 2, 2, 2, 3]
    assert cse.total(4)[aligned].payload == 4 * 3 * auxiliary


def test_full_models():
    """FedAvg sends one uncut model in fp32; pretraining sends deltas, and fp32 only at first."""
    fedavg, pretrain = plan("fedavg"), plan("pretrain")
    found = fedavg.shapes
    whole = 4 * found.whole.values
    assert payloads(fedavg.flows) == {("full model", "up"): whole, ("full model", "down"): whole}
    size = FORMATS["uniform"].payload(found.whole.values)
    assert payloads(pretrain.flows) == {("full model", "up"): size, ("full model", "down"): size}
    assert pretrain.format == "uniform"
    assert payloads(pretrain.first) == {("full model", "down"): whole}


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 30))
def test_uploaded_samples_are_those_of_every_qth_batch(samples, batch, every):
    """A formula and a run differ first where the last batch is short."""
    work = Workload(1, batch, samples, every)
    batches = [min(batch, samples - start) for start in range(0, samples, batch)]
    assert work.steps == len(batches)
    assert work.samples_of(every) == sum(batches[::every])


def test_formats_state_payload_exactly_and_never_estimate_more_than_it():
    """Payloads are compared with ledgers to the byte; no estimate exceeds the raw codes."""
    expected = {"fp32": 4000, "bf16": 2000, "e4m3": 1008, "e5m2": 1008, "uniform": 1010}
    for name, one in FORMATS.items():
        assert one.payload(1000) == expected[name]
        assert all(0 < one.coded(10**6, kind) < one.payload(10**6) for kind in Kind)


def test_seconds_add_transfer_and_delays_and_sequential_clients_take_turns():
    """Auxiliary models exist because of long links: the planner must count round trips."""
    split, sequential, lazy = plan("splitfed-v1"), plan("sl"), plan("fsl-sage")
    sent = sum(f.size.coded for f in split.flows)
    assert split.seconds_per_round == pytest.approx(8 * sent / 1e6 + (2 + 2 * 5) * 0.5)
    assert sequential.seconds_per_round == pytest.approx(3 * split.seconds_per_round)
    up, down = lazy.mean_coded(Direction.UP), lazy.mean_coded(Direction.DOWN)
    waits = 2 + 2 / 3
    assert lazy.seconds_per_round == pytest.approx(8 * (up + down) / 1e6 + waits * 0.5, rel=1e-4)


def test_links_are_read():
    """Every unit is read, with and without a delay, and bad links are refused."""
    assert parse_link("100mbit,20ms") == LinkSpec(1e8, 0.02)
    assert parse_link("1.5Gbit") == LinkSpec(1.5e9, 0.0)
    assert parse_link("64kbit, 2s") == LinkSpec(64e3, 2.0)
    assert parse_link("9600bit,500us").delay_s == pytest.approx(5e-4)
    for megabit in ("100mbps", "100 Mbit/s", "100Mb/s", "100Mbits/s", "100MBIT", "100000 kbit/s"):
        assert parse_link(f"{megabit}, 5 ms") == LinkSpec(1e8, 0.005), megabit
    assert parse_link("1 Gbit/s") == parse_link("1Gbps") == LinkSpec(1e9, 0.0)
    for wrong in (
        "",
        "100MB/s",
        "100MBps",
        "100Mbytes",
        "fast",
        "100",
        "100mbit,20",
        "0mbit",
        "-1mbit",
        "1mbit,1ms,2",
        "9" * 400 + "mbit",
        "0.5bit",
        "1mbit,90000s",
    ):
        with pytest.raises(UsageError, match="--link"):
            parse_link(wrong)


def test_memory_follows_the_stated_rule():
    """The rule is worked out by hand for one method of each kind."""
    found = find_shapes("gpt-0.5m")
    batch = 7
    own = ALL_METHODS["splitfed-v1"].memory(found, batch)
    assert own.weights == own.gradients == 4 * found.client.parameters
    assert own.optimizer == 8 * found.client.parameters
    assert own.activations == 4 * 7 * (found.client.activations + 2 * found.cut_values)
    sage, cse = (ALL_METHODS[method].memory(found, batch) for method in ("fsl-sage", "cse-fsl"))
    assert sage.weights == cse.weights == own.weights + 4 * found.auxiliary.values
    assert sage.activations == cse.activations == own.activations + 28 * found.auxiliary.activations
    assert (sage.gradients, sage.optimizer) == (own.gradients, own.optimizer)
    assert cse.optimizer == own.optimizer + 8 * found.auxiliary.parameters
    tailed = ALL_METHODS["sl-u"].memory(found, batch)
    assert tailed.gradients == 4 * (found.client.parameters + found.tail.parameters)
    assert ALL_METHODS["pretrain"].memory(found, batch) == trained(found.whole, batch)
    assert own.total < trained(found.whole, batch).total
    assert sum((own.weights, own.gradients, own.optimizer, own.activations)) == own.total


@pytest.mark.parametrize("method", ALL_METHODS)
def test_each_method_prints_both_ways(method, capsys):
    """The table and the JSON object must show the same plan."""
    line = ["plan", "--method", method, "--model", "gpt-0.5m", "--clients", "3", "--rounds", "4"]
    assert cli.main(line) == 0
    text = capsys.readouterr().out
    assert "total of all clients" in text
    assert cli.main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == method
    made = make_plan(
        method=method,
        shapes=find_shapes("gpt-0.5m"),
        work=Workload(3, 16, 5000, 5, 10),
        link=parse_link("100mbit,20ms"),
    )
    assert found == json.loads(json.dumps(as_dict(made, 4)))
    assert text.splitlines() == as_text(made, 4)
    assert "iB" not in text
    assert found["total_payload_bytes"] == sum(size.payload for size in made.total(4).values())
    assert made.total_size(4) == sum(made.total(4).values(), start=type(made.total_size(0))())
    assert found["client_memory_bytes"]["total"] == made.memory.total


def test_one_command_repeats_a_published_figure(capsys):
    """The published setup is the command's default, so one line checks a figure."""
    line = "plan --method fsl-sage --model resnet18-cifar10 --as-published --rounds 89 --json"
    assert cli.main(line.split()) == 0
    assert round(json.loads(capsys.readouterr().out)["total_gib"], 3) == 12.201


MISTAKES = [
    (
        "--model resnet18-cifar10 --method fedprox",
        "--method 'fedprox' is unknown; known: sl, sl-u,",
    ),
    ("--model x --method sl", "--model 'x' is unknown; known: resnet18-cifar10, resnet18-cifar100"),
    (
        "--model gpt-1m --method sl --cut 5",
        "--cut '5' does not exist in gpt-1m; cuts: 0 to 4, the blocks",
    ),
    ("--model 1m --method sl --cut x", "--cut 'x' does not exist in gpt-1m"),
    (
        "--model resnet18-cifar10 --method sl --cut layer4",
        "--cut 'layer4' does not exist in resnet18-cifar10; cuts: layer1, layer2, layer3",
    ),
    (
        "--model 1m --method sl --format fp8",
        "--format 'fp8': use one of fp32, bf16, e4m3, e5m2, uniform",
    ),
    (
        "--model 1m --method sl --link 3",
        "--link '3': write rate and one-way delay like 100mbit,20ms",
    ),
    (
        "--model 1m --method sl --as-published",
        "--as-published: no figures of sl were published; use split",
    ),
    ("--model 1m --method fedavg --as-published --format bf16", "--as-published counts in fp32"),
    ("--model 1m --method sl --cut 0000000009", "--cut '0000000009' does not exist in gpt-1m"),
    ("--model 1m --method sl --batch 0", "invalid value for '--batch'"),
    (
        "--model gpt-0.5m --method sl --set model.context=64",
        "--set model.context=64 does not change gpt-0.5m",
    ),
]


def test_absurd_numbers_are_still_json(capsys):
    """The largest numbers over the slowest link: an infinite time would not be JSON."""

    def strictly(word):
        raise AssertionError(word)

    most = str(10**12)
    words = ["--clients", most, "--samples-per-client", most, "--rounds", most, "--batch", "1"]
    line = ["--model", "gpt-1b", "--method", "sl-u", "--link", "1bit,86400s", "--json"]
    assert cli.main(["plan", *line, *words]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=strictly)["total_seconds"] > 1e30


def test_the_default_formats_are_those_that_help_names(capsys):
    """The help once named e4m3 for pretraining when the default was uniform."""
    assert cli.main(["plan", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    formats = [plan(method).format for method in ("sl", "pretrain")]
    assert "[default: {}; pretrain: {}]".format(*formats) in shown


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_every_mistake_is_one_line_and_exit_code_2(capsys, line, message):
    """The error for bad input must name the good input."""
    assert cli.main(["plan", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_a_workload_made_in_python_is_checked_too():
    """Other packages build workloads from settings, without the command line's checks."""
    with pytest.raises(UsageError, match="align_every is 0"):
        Workload(1, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("model", "batch"), [("gpt-1b", 16), ("350m", 16), ("resnet18-cifar10", 256)]
)
def test_the_default_batch_is_one_that_is_used(capsys, model, batch):
    """A client of gpt-1b was planned with 256 windows a step, and 1.66 TiB of memory."""
    assert load(None).train.batch == TEXT_BATCH
    assert cli.main(["plan", "--method", "fedavg", "--model", model, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == batch
    assert cli.main(["plan", "--help"]) == 0
    help_text = " ".join(capsys.readouterr().out.split())
    assert "[default: 256; of a language model that of a run, 16]" in help_text


@pytest.mark.parametrize(("sets", "warned"), [([], True), (["--set", "model.preset=0.5m"], False)])
def test_a_family_is_planned_at_a_stated_size(capsys, sets, warned):
    """`--model llama` was a toy of 4 M parameters, and the plan did not say so."""
    assert cli.main(["plan", "--method", "pretrain", "--model", "gpt", *sets, "--json"]) == 0
    out, err = capsys.readouterr()
    parameters = find_shapes("gpt-3m").whole.parameters
    assert (f"a small one of {parameters:,} parameters" in err) is warned
    assert json.loads(out)["batch"] == 16
    assert cli.main(["plan", "--method", "pretrain", "--model", "gpt-3m"]) == 0
    assert f"gpt-3m: {parameters:,} parameters" in capsys.readouterr().out


def test_methods_of_the_reference_have_its_accounting():
    """--as-published must offer the five published methods and no others."""
    published = {name for name, one in PLANNED.items() if one.published}
    assert published == {"splitfed-v1", "splitfed-v2", "cse-fsl", "fsl-sage", "fedavg"}
    assert find_shapes("resnet18-cifar100").cut in RESNET_CUTS
