"""An audit of a site's records by the command, with a small base."""

import importlib.util
import json

import pytest
from click.testing import CliRunner

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import tiny_base
from client_sides import Sides

from fsl_async.commands.audit import EXCEEDED, command
from fsl_async.config.exposure import exposure_of
from fsl_async.config.load import load
from fsl_async.config.site_policy import SiteChoices, SitePolicy
from fsl_async.errors import FslError, NotAllowedError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.tune.base import load_base

TEXTS = ("a cold night", "warm bread", "nothing new", "deep blue sea", "two old men", "quick fox")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_base.write_bert(tmp_path_factory.mktemp("bert"), width=384)


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "mine.csv"
    rows = [f"{text} {n},{('no', 'yes')[n % 2]}\n" for n in range(4) for text in TEXTS]
    path.write_text("text,label\n" + "".join(rows))
    return path


@pytest.fixture
def audit(base, data, tmp_path):
    def run(*more, keys=tmp_path):
        words = ["--base", base, "--data", data, "--keys", keys, "--steps", 2, "--batch", 2]
        sets = ["tune.objective=classify", "tune.labels=no,yes", "tune.targets=query,value"]
        sets += ["train.batch=2", "run.rounds=3", "codec.up=fp32"]
        words += [word for one in sets for word in ("--set", one)] + list(more)
        return CliRunner().invoke(command, list(map(str, words)), standalone_mode=False)

    return run


def found(result):
    return json.loads([line for line in result.stdout.splitlines() if line.startswith("{")][-1])


def test_a_record_is_read_from_one_plain_step_and_not_from_ffa(audit, tmp_path):
    """In order and in words, beside the other settings; the page has the same."""
    result = audit("--json", "--html", tmp_path / "page.html")
    assert result.return_value == 0
    report = found(result)
    by_label = {one["label"]: one for one in report["readings"]}
    plain = by_label["1 step of 1 record, plain SGD"]
    assert plain["read"] == 1.0
    assert plain["in_order"] > 0.5
    assert by_label["this run"]["words"] > plain["words"]
    assert by_label["1 step of 1 record, tune.rule = ffa"]["read"] == 0.0
    assert 0 < report["worst"]["share"] <= 1
    assert report["epsilon"] is None
    assert report["beyond"] == []
    assert "<td>1 step of 1 record, plain SGD<td>" in (tmp_path / "page.html").read_text()
    again = found(audit("--json"))
    drop_private = slice(None, -1)  # its noise is the operating system's
    assert again.pop("readings")[drop_private] == report.pop("readings")[drop_private]
    assert again == report, "the same bits twice"


def test_a_sites_limits_decide_the_exit_code(audit, tmp_path):
    (tmp_path / "site.toml").write_text("[audit]\nwords = 5\nauc = 1\n")
    result = audit()
    assert result.return_value == EXCEEDED
    assert "of the words; this site allows 5 %" in result.stderr
    assert "not by this attack" not in result.stdout
    assert "what is not read here is not read by this attack" in result.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[audit]\nwords = 101\n", "audit.words is a number from 0 to 100"),
        ("[audit]\nauc = true\n", "audit.auc is a number from 0.5 to 1"),
        ("[audit]\nword = 1\n", "the table audit has words, in percent, and auc"),
        ("audit = 3\n", "the table audit has words, in percent, and auc"),
    ],
)
def test_wrong_limits_are_refused_before_training(audit, tmp_path, text, problem):
    (tmp_path / "site.toml").write_text(text)
    result = audit()
    assert isinstance(result.exception, FslError)
    assert problem in result.exception.message


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--set", "tune.method=none"), "this run tunes no base model"),
        (("--html", "."), "--html . is a folder: name a file"),
        (("--html", "no folder/page.html"), "there is no such folder"),
    ],
)
def test_what_cannot_be_audited_is_refused_in_a_line(audit, words, problem):
    """Before it trains, and not as an audit of another run."""
    result = audit(*words)
    assert isinstance(result.exception, FslError)
    assert problem in result.exception.message


def test_zeroth_order_sends_numbers(audit):
    result = audit("--order", "zeroth", "--json")
    assert found(result)["scalars"] == 5


def test_a_site_is_told_and_asked_before_words_leave(base):
    """Its client prints what the settings expose; rows of an embedding must be allowed."""

    def joins(policy, *, evaluates=False, **tune):
        sides, lines = Sides(publishes=True), []
        context = ClientContext(
            "a",
            config={"tune": {"method": "lora", **tune}},
            policy=policy,
            log=lines.append,
            site=SiteChoices(duty="evaluate" if evaluates else "train"),
        )
        Fed(sides.training, context).lora(load_base(base, "classify", labels=("no", "yes")).model)
        return "".join(lines[-1:])

    assert "lets its server read words of the records" in joins(SitePolicy())
    assert "trains factor B alone" in joins(SitePolicy(), rule="ffa", targets="query")
    with pytest.raises(NotAllowedError, match="words of the records: it needs embeddings"):
        joins(SitePolicy(), full="*word_embeddings*")
    said = joins(SitePolicy(), evaluates=True, full="*word_embeddings*")
    assert "this run" not in said, "it sends no update"
    allowed = SitePolicy(frozenset({"deltas", "embeddings"}))
    assert "exactly which words" in joins(allowed, full="*word_embeddings*")


def test_the_line_at_joining_is_true(audit):
    """Words are read where the table says so, and nowhere else."""
    for rule in ("fedit", "ffa", "fedsvd"):
        config = load(None, ["tune.method=lora", f"tune.rule={rule}"])
        exposed = exposure_of(config.tune, is_zeroth=False, trains_embedding=False)
        report = found(audit("--json", "--rule", rule))
        read = max(one["read"] for one in report["readings"] if "tune.rule" not in one["label"])
        assert (read > 0) == (exposed == "words"), rule
    report = found(audit("--json", "--set", "tune.full=*word_embeddings*"))
    assert all(one["by_rows"] for one in report["readings"][:3])
    assert (report["readings"][0]["read"], report["readings"][0]["precision"]) == (1.0, 1.0)


def test_ten_rounds_expose_a_code_the_more_often_it_is_there(tmp_path):
    """Each code was planted once, 4 or 16 times, beside 1,000 that were not."""
    llama = tiny_base.write_llama(tmp_path)
    data = tmp_path / "mine.jsonl"
    data.write_text("".join(json.dumps({"text": f"{text} {n}"}) + "\n"
                            for n in range(4) for text in TEXTS))  # fmt: skip
    words = ["--base", llama, "--data", data, "--keys", tmp_path, "--long", "--json"]
    words += ["--steps", 10, "--batch", 4, "--rank", 8]
    for one in (
        "tune.objective=lm",
        "train.learning_rate=0.02",
        "tune.targets=q_proj,v_proj,up_proj",
    ):
        words += ["--set", one]
    result = CliRunner().invoke(command, list(map(str, words)), standalone_mode=False)
    assert result.return_value == 0, result.exception
    report = found(result)
    once, often = (dict(report["exposures"])[copies] for copies in (1, 16))
    assert once < often <= report["most_exposure"] < 10
    assert report["rounds"] == 10
    assert 0.5 < report["member"]["auc"] <= 1
    assert report["merged"]["auc"] > 0.7
