"""`demo lora`: how records are dealt, what runs, when it ends, what it prints."""

import asyncio
import json
import re
from types import SimpleNamespace

import attrs
import pytest

from fsl_async.commands import demo
from fsl_async.config.load import load, resolved
from fsl_async.errors import ConfigError, DataError, FslError, UsageError
from fsl_async.observe.clients import ClientState
from fsl_async.observe.ledger_audit import Audit
from fsl_async.process.program import to_install
from fsl_async.process.stopper import Stopper
from fsl_async.tools.demo import lora, lora_data
from fsl_async.tools.demo.lora import LoraDemo, LoraPlay
from fsl_async.tools.demo.lora_summary import (
    Work,
    problems,
    summarize,
    table,
    text_lines,
    work_of,
)
from fsl_async.tools.demo.play import Played

AUDIT = Audit(4, 6, 600, 6, 0, 0, (), (), ())
NAMES = ["client-1", "client-2", "client-3"]
MEASURED = {
    "base": {"loss": 4.0},
    "federated": {"loss": 3.25, "version": 4, "values": 100},
    "client-1": {"loss": 3.5},
    "client-2": {"loss": 3.75},
    "client-3": {"loss": 3.625},
    "pooled": {"loss": 3.0},
}
WORK = {name: Work(2, 20, 200, 300) for name in NAMES}


@pytest.fixture
def settings(tmp_path):
    """A demo of three clients and four rounds."""
    return LoraDemo(
        base="", files=(), rule="fedit", rank=0, rounds=4, steps=10, seconds=60.0, clients=3,
        format="uniform", seed=5, run_dir=tmp_path / "run",
    )  # fmt: skip


@pytest.fixture
def played():
    """A demo in which all went well."""
    found = Played(killed_s=10.0, detected_s=13.0, relaunched_s=14.0, caught_up_s=20.0)
    found.state.ps.version = 4
    return found


def summary_of(settings, played, measured=MEASURED, **more):
    facts = {"rank": 8, "base_bytes": 1000, "base_unchanged": True, "seconds": 50.0, **more}
    return summarize(settings, played, AUDIT, WORK, measured, **facts)


# --- data ---


def test_records_keep_every_paragraph_in_order():
    """A record is whole paragraphs; text must neither be lost nor doubled."""
    paragraphs = [f"paragraph {number} " * (number % 5 + 1) for number in range(30)]
    records = lora_data.records_of("\n\n".join(paragraphs), 100)
    assert [one.strip() for record in records for one in record.split("\n\n")] == [
        one.strip() for one in paragraphs
    ]
    assert 1 < len(records) < 30
    assert all(len(one) <= 100 or "\n\n" not in one for one in records)


def test_topics_of_one_subject_go_to_one_site():
    """Sites with the same subjects would have nothing to learn from each other."""
    animals = {f"a{i}": "horse goat sheep cattle pasture meadow " * 20 for i in range(4)}
    ships = {f"b{i}": "harbor anchor vessel captain sailor voyage " * 20 for i in range(4)}
    mixed = dict(sorted((animals | ships).items(), key=lambda each: each[0][1]))
    found = [set(names) for names in lora_data.dealt(mixed, 2)]
    assert sorted(map(sorted, found)) == [sorted(animals), sorted(ships)]


@pytest.mark.parametrize("sites", [1, 2, 3, 7, 64])
def test_each_topic_goes_to_one_site_and_each_site_gets_one(sites):
    """A topic at two sites would be on both sides of the test; a site without any cannot train."""
    topics = lora_data.python_topics()
    found = lora_data.dealt(topics, sites)
    assert sorted(name for names in found for name in names) == sorted(topics)
    assert len(found) == sites
    assert all(found)


def test_three_sites_get_about_the_same_amount_of_text():
    """Else the comparison with a site alone is one of amounts."""
    topics = lora_data.python_topics()
    sizes = [sum(len(topics[one]) for one in names) for names in lora_data.dealt(topics, 3)]
    assert max(sizes) < 1.5 * min(sizes)


def test_too_few_topics_are_an_error():
    """One line instead of a site without data."""
    with pytest.raises(DataError, match="2 topics cannot be dealt to 3 clients"):
        lora_data.dealt({"a": "text", "b": "text"}, 3)


@pytest.mark.parametrize("count", [2, 3, 9, 10, 11, 100])
def test_test_records_are_not_trained_on(count):
    """A loss on what was trained says nothing."""
    train, test = lora_data.held_out([str(number) for number in range(count)])
    assert sorted([*train, *test], key=int) == [str(number) for number in range(count)]
    assert train
    assert test
    assert len(test) == max(1, count // 10)


def test_one_record_cannot_be_divided():
    """It would be trained on and tested with."""
    with pytest.raises(DataError, match="at least two records"):
        lora_data.held_out(["one"])


def test_the_pooled_records_are_those_of_all_sites(settings):
    """The comparison in one place must see the same records, and the test all sites' tests."""
    settings.run_dir.mkdir()
    lora.deal(settings)
    for part in (lora_data.TRAIN_FILE, lora_data.TEST_FILE):
        mine = [(settings.sites / name / part).read_text().splitlines() for name in NAMES]
        together = (settings.run_dir / "pooled" / part).read_text().splitlines()
        assert together == [line for lines in mine for line in lines]
        assert all(json.loads(line)["text"] for line in together)


def test_own_files_are_dealt_one_to_a_client(settings, tmp_path):
    """Records of any shape stay as they are."""
    files = []
    for name in NAMES:
        files.append(tmp_path / f"{name}.jsonl")
        rows = [{"prompt": name, "completion": str(number)} for number in range(16)]
        files[-1].write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    settings.run_dir.mkdir()
    lora.deal(attrs.evolve(settings, files=tuple(files)))
    lines = (settings.sites / "client-2" / lora_data.TRAIN_FILE).read_text().splitlines()
    assert len(lines) == 15
    assert {json.loads(line)["prompt"] for line in lines} == {"client-2"}


# --- the run ---


def test_the_run_is_configured_as_asked(settings):
    """The options must reach the run as settings."""
    config = resolved(load(None, attrs.evolve(settings, rule="ffa", rank=4).overrides()))
    assert (config.tune.method, config.tune.rule, config.tune.adapter_rank) == ("lora", "ffa", 4)
    assert (config.sync.trigger, config.tune.steps, config.run.seed) == ("rounds", 10, 5)
    assert config.data.holdout == 0.0  # the test records are apart


def test_a_site_lets_adapters_out_and_nothing_else_of_its_model(settings):
    """The demo shows that texts and base stay at home."""
    argv = settings.client("client-2", "tcp://127.0.0.1:5").argv
    assert argv[argv.index("--allow") + 1] == "adapters,metrics"
    assert argv[argv.index("--data") + 1] == str(settings.sites / "client-2" / "train.jsonl")
    assert argv[argv.index("--base") + 1] == str(settings.run_dir / "base")
    own = attrs.evolve(settings, base="/models/own")
    assert str(own.base_folder) == "/models/own"


def test_files_and_clients_must_be_as_many(settings, tmp_path):
    """Else a client has none."""
    with pytest.raises(UsageError, match="--data is given 1 times for 3 clients"):
        lora.check(attrs.evolve(settings, files=(tmp_path / "a.jsonl",)))


def test_a_missing_extra_is_one_line(settings, monkeypatch):
    """The demo needs transformers and peft."""
    monkeypatch.setattr(lora.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(to_install("hf"))):
        lora.check(settings)


def test_the_run_ends_when_the_killed_client_trains_again(settings):
    """Rounds alone would end a fast run before the client is back."""
    play = LoraPlay(settings, SimpleNamespace(), SimpleNamespace())
    ps, victim = play.played.state.ps, ClientState(name="client-2", connected=True, version=1)
    play.played.state.clients["client-2"] = victim
    assert not play._is_time_to_kill()
    ps.version = 1
    assert play._is_time_to_kill()
    victim.connected = False
    assert not play._is_time_to_kill()
    play.played.killed_s, ps.version = 5.0, 9
    assert play._stop_at() == settings.seconds
    play.played.caught_up_s = 8.0
    assert play._stop_at() == settings.seconds
    ps.version = 10
    assert play._stop_at() == 0.0


# --- the worker ---

GOOD = """
print("the base: learns")
(run_dir / "base").mkdir()
print('{"made": "base"}')
while not (run_dir / "compare.json").exists():
    time.sleep(0.01)
for job in json.loads((run_dir / "compare.json").read_text()):
    for one in job["jobs"]:
        print(json.dumps({"name": one["name"], "loss": 0.5, "steps": one["steps"]}))
"""


@pytest.fixture
def stands_in(tmp_path, monkeypatch):
    """A function that lets `Worker` run a text as its program."""

    def use(program):
        head = "import json, pathlib, sys, time\nrun_dir = pathlib.Path(sys.argv[1])\n"
        (tmp_path / "stand_in.py").write_text(head + program)
        monkeypatch.setattr(lora.Worker, "module", "stand_in")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return use


def in_worker(demo, steps, said):
    """What `Worker.compare` returns."""

    async def ask():
        async with lora.Worker(demo, said.append, Stopper()) as worker:
            await worker.made_base()
            return await worker.compare(steps)

    demo.run_dir.mkdir()
    return asyncio.run(ask())


def test_both_sides_train_as_many_steps_as_the_run(settings):
    """The comparison is honest only with the same number of steps and the same test."""
    pooled, alone = lora.orders(settings, {"client-1": 20, "client-2": 14})
    assert [one["steps"] for one in pooled["jobs"]] == [34]
    assert [one["steps"] for one in alone["jobs"]] == [20, 14]
    for key in ("overrides", "base", "test"):
        assert pooled[key] == alone[key]


def test_a_worker_makes_the_base_and_compares(settings, stands_in):
    """Lines of progress are shown, records are collected."""
    stands_in(GOOD)
    said = []
    found = in_worker(settings, {"client-1": 20, "client-2": 14}, said)
    assert said == ["the base: learns"]
    assert {name: one["steps"] for name, one in found.items()} == {
        "client-1": 20, "client-2": 14, "pooled": 34,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("program", "text", "code"),
    [
        ('print("error: no memory"); print("more"); sys.exit(2)', "no memory", 2),
        ('sys.exit("Traceback")', r"the worker ended \(exit code 1.*Traceback", 1),
        ("", "the worker ended", 1),
        (GOOD + 'print("error: no memory"); print("more"); sys.exit(2)', "no memory", 2),
    ],
)
def test_a_worker_that_fails_is_one_line(settings, stands_in, program, text, code):
    """Before the run it is the demo's error, after the run its problem."""
    stands_in(program)
    with pytest.raises(FslError, match=text) as caught:
        in_worker(settings, {"client-1": 20}, [])
    assert caught.value.exit_code == code


# --- the result ---


def test_work_is_counted_from_the_ledger():
    """All incarnations of a client count, other facts do not."""
    accepted = {"fact": "accepted", "steps": 10, "tokens": 100, "bytes": 7}
    facts = [
        {**accepted, "key": "b/1/0/1"},
        {**accepted, "key": "b/2/3/1"},
        {**accepted, "key": "a/1/0/1"},
        {"fact": "version", "version": 1, "merged": []},
    ]
    assert work_of(facts) == {"a": Work(1, 10, 100, 7), "b": Work(2, 20, 200, 14)}


def test_the_table_has_all_losses_side_by_side(settings, played):
    """Each row must show its own model's loss."""
    rows = [line.split() for line in table(summary_of(settings, played))[1:]]
    assert [row[-2:] for row in rows[1:]] == [
        ["3.500", "0.500"], ["3.750", "0.250"], ["3.625", "0.375"], ["3.625", "0.375"],
        ["3.250", "0.750"], ["3.000", "1.000"],
    ]  # fmt: skip
    assert rows[0][-1] == "4.000"
    assert rows[5][0] == "federated"


def test_a_good_demo_has_no_problems(settings, played):
    """A demo that passed must have exit code 0."""
    summary = summary_of(settings, played)
    assert problems(settings, played, AUDIT, summary) == []
    assert (summary.loss_alone, summary.bytes_up, summary.bytes_up_fp32) == (3.625, 150, 400)
    shown = "\n".join(text_lines(settings, played, summary, AUDIT))
    assert "0 lost, 0 merged twice" in shown
    assert "base's files: unchanged" in shown


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ({"killed_s": None}, "was not killed"),
        ({"detected_s": None}, "did not detect"),
        ({"caught_up_s": None}, "did not catch up"),
        ({"faults": ["client-1 ended"]}, "client-1 ended"),
    ],
)
def test_each_missing_event_is_reported(settings, played, fault, text):
    """A demo without one of its events must not pass."""
    summary = summary_of(settings, played)
    found = problems(settings, attrs.evolve(played, **fault), AUDIT, summary)
    assert len(found) == 1
    assert text in found[0]


@pytest.mark.parametrize(
    ("measured", "more", "text"),
    [
        (MEASURED, {"base_unchanged": False}, "files have changed"),
        (MEASURED | {"federated": {"loss": 4.0, "values": 1}}, {}, "not below the base's 4.000"),
        ({"base": {"loss": 4.0}}, {}, "not all models were measured"),
    ],
)
def test_a_wrong_result_is_reported(settings, played, measured, more, text):
    """The exit code stands for the losses and the base too."""
    found = problems(settings, played, AUDIT, summary_of(settings, played, measured, **more))
    assert len(found) == 1
    assert text in found[0]


def test_too_few_rounds_and_lost_deltas_are_reported(settings, played):
    """As in the other demos."""
    played.state.ps.version = 3
    lost = attrs.evolve(AUDIT, lost=("a/1/0/1",))
    found = problems(settings, played, lost, summary_of(settings, played))
    assert "3 of 4 rounds" in found[0]
    assert "is lost: a/1/0/1" in found[1]
    assert problems(settings, played, None, None)[1] == "there is no ledger to audit"


def test_options_of_other_demos_are_refused():
    """One text is not one of several, and a GPT has no base."""
    for options, text in ((["--base", "."], "--base"), (["--data", ".", "--data", "."], "--data")):
        with pytest.raises(UsageError, match=text):
            demo.command.main(options, standalone_mode=False)
