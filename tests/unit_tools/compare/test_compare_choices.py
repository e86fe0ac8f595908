"""What is compared: options and settings, checked, for both kinds of comparison."""

import re

import pytest

from fsl_async.cli import main
from fsl_async.errors import ConfigError, FslError, UsageError
from fsl_async.tools.compare.choices import is_scored, parse_names, parse_numbers
from fsl_async.tools.compare.split import SplitChoices, SplitComparison
from fsl_async.tools.compare.table import check_plot
from fsl_async.tools.compare.tune import METHODS, ZEROTH, TuningChoices, is_tuning
from fsl_async.tools.demo.places import net_of

CLASSIFY = ("tune.objective=classify", 'tune.labels="no,yes"')


def split(data, *methods, **more):
    return SplitChoices(methods=methods or ("sl",), data=(str(data),), **more)


def tuned(*methods, **more):
    given = {"base": "base", "data": ("a", "b"), "methods": methods or ("fedit", "bank"), **more}
    return TuningChoices(**given)


def config(choices, method=None):
    return choices.run(method or choices.methods[0]).config


def test_settings_beside_the_options_and_a_preset_that_gives_way(images):
    """A published run is compared by its preset; an option that is given counts more."""
    sets = ("split.betas=0.9,0.999", "data.partition=dirichlet-equal")
    found = config(split(images, settings={"split.optimizer": "adam"}, sets=sets, alpha=0.5))
    assert (found.split.optimizer, found.split.betas) == ("adam", "0.9,0.999")
    assert (found.data.partition, found.data.alpha) == ("dirichlet-equal", 0.5)
    published = split(
        images,
        "cse-fsl",
        model="small-cnn",
        settings={"train.batch": "12", "split.cut": "", "split.align_passes": "2"},
        sets=("split.preset=published-fsl-sage", "split.align_batch=3"),
    )
    found = config(published)
    assert (found.split.method, found.model.family) == ("cse-fsl", "small-cnn")
    assert (found.train.batch, found.split.buffer_samples) == (12, 1000)
    assert (found.split.align_passes, found.split.align_batch) == (2, 3)
    row = published.used(published.run("cse-fsl"))
    assert (row["model"], row["batch"], row["align_passes"]) == ("small-cnn", 12, 2)
    assert (row["optimizer"], row["buffer_samples"]) == ("adam", 1000), "in rows, what has run"
    with pytest.raises(UsageError, match=r"--set train.batch: is set by --batch"):
        config(split(images, sets=("train.batch=4",)))
    with pytest.raises(UsageError, match=r"--learning-rate: above 0"):
        config(split(images, settings={"train.learning_rate": "0.0"}))
    with pytest.raises(UsageError, match=r"--set split.listen: is set by compare"):
        config(split(images, sets=("split.listen=tcp://0.0.0.0:7",)))
    with pytest.raises(ConfigError, match=r"^--batch: "):
        config(split(images, settings={"train.batch": "ten"}))


def test_what_a_comparison_has_where_nothing_is_given(images):
    """Some values differ from those of a run, as the help has them."""
    found = config(split(images))
    assert (found.split.samples, found.split.align_every, found.split.align_rate) == (0, 2, 3e-3)
    assert (found.train.batch, found.train.weight_decay, found.model.family) == (
        32, 1e-4, "small-cnn",
    )  # fmt: skip


def test_a_preset_in_quotation_marks_is_the_same_preset(images):
    """As TOML it would otherwise give way to the defaults, silently."""
    plain, quoted = (
        config(split(images, "fsl-sage", sets=(f"split.preset={text}",)))
        for text in ("published-fsl-sage", '"published-fsl-sage"')
    )
    assert quoted == plain
    assert quoted.model.family == "resnet18"


def test_alpha_beside_a_partition_without_shares_is_refused(images):
    """One of both would be ignored."""
    for kind in ("iid", '"sorted"'):
        choices = split(images, alpha=0.1, sets=(f"data.partition={kind}",))
        with pytest.raises(UsageError, match=r"--alpha: data.partition = (iid|sorted) has no sh"):
            config(choices)


def test_a_sequential_round_is_a_turn_of_every_client(images):
    """Rounds of all methods hold the same amount of training."""
    choices = split(images, "sl", "fedavg", clients=3, rounds=4)
    assert config(choices, "sl").run.rounds == 12
    assert config(choices, "fedavg").run.rounds == 4
    assert choices.run("sl").turns == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"split.cut": "pool7"}, "no cut 'pool7'; cuts that exist: conv1"),
        ({"split.auxiliary": "blocks:9"}, "blocks:9"),
        ({"model.sizes": "depth=3"}, "small-cnn cannot be built"),
    ],
)
def test_errors_are_raised_before_anything_starts(images, settings, words):
    """A run of an hour does not fail in its third method."""
    with pytest.raises(FslError, match=words) as caught:
        SplitComparison(split(images, "fsl-sage", settings=settings)).check()
    assert "\n" not in caught.value.message


def test_all_rules_have_one_rank_and_train_by_rounds():
    """A bank's default would be larger, and rules that allow the clock would train otherwise."""
    for method in METHODS:
        found = config(tuned(), method)
        if method != ZEROTH:
            assert (found.tune.rule, found.tune.adapter_rank) == (method, 8)
        assert (found.sync.trigger, found.sync.clients) == ("rounds", 2)


def test_unequal_ranks_are_of_rules_that_allow_them():
    """Others run at the run's rank, which is the largest one unless it is set."""
    found = tuned(ranks=(2, 4))
    assert [found.run(name).ranks for name in ("fedit", "bank")] == [(4, 4), (2, 4)]
    wider = tuned(ranks=(2, 4), sets=("tune.rank=16",))
    assert [wider.run(name).ranks for name in ("fedit", "bank")] == [(16, 16), (2, 4)]
    words = wider.run("bank").clients["client-2"]
    assert words[words.index("--rank") + 1] == "4"


def test_records_are_held_out_where_none_are_given():
    """With --eval a site trains on all that it has."""
    assert config(tuned()).data.holdout > 0
    assert config(tuned(held_out="x")).data.holdout == 0
    assert config(tuned(held_out="x", sets=("data.holdout=0.1",))).data.holdout == 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ranks": (2,)}, "--ranks: 1 ranks, and 2 sites"),
        ({"ranks": (2, 4), "methods": ("fedit", "ffa")}, "none of the methods allows .*, bank do"),
        ({"ranks": (2, 4), "sets": ("tune.rank=3",)}, "between 1 and the run's rank, which is 3"),
        ({"ranks": (0, 4)}, "between 1 and the run's rank, which is 4"),
        ({"orders": ("first",)}, "--orders: 1 orders, and 2 sites"),
        ({"orders": ("first", "zeroth"), "methods": ("fedit", "zeroth")}, "sites of the method"),
        ({"sets": ("tune.rule=ffa",)}, "--set tune.rule: is set by --methods"),
        ({"sets": ("run.seed=1",)}, "is set by --seed or --seeds"),
        ({"stops_at_target": True}, "there is no target"),
        ({"target_accuracy": 0.7}, "this objective has --target-loss instead"),
        ({"target_loss": 0.7, "sets": CLASSIFY}, "this objective has --target-accuracy instead"),
    ],
)
def test_bad_choices_are_one_line(given, words):
    """They are found before training, and the line has what would be right."""
    methods = given.pop("methods", ())
    with pytest.raises(UsageError, match=words) as caught:
        tuned(*methods, **given)
    assert "\n" not in caught.value.message


def test_training_alone_makes_as_many_steps_as_a_site():
    """Zeroth order counts steps of its own, unless rules are compared with it."""
    sets = ("tune.steps=3", "tune.zo_steps=2")
    assert tuned("fedit", rounds=5, sets=sets).steps == 15
    assert tuned("fedit", "zeroth", rounds=5, sets=sets).steps == 15
    assert tuned("zeroth", rounds=5, sets=sets).steps == 10


def test_not_all_versions_need_a_score():
    """The last one has a score whatever the step, the base has none, nor a turn within a round."""
    assert [v for v in range(8) if is_scored(v, 3, 7, 1)] == [3, 6, 7]
    assert [v for v in range(9) if is_scored(v, 1, 4, 2)] == [2, 4, 6, 8]
    assert not any(is_scored(v, 0, 4, 1) for v in range(5))


def test_names_and_numbers_are_read():
    """A method's name counts once; each site has an order of its own."""
    assert parse_names("--methods", " bank,FFA,,bank", METHODS) == ("bank", "ffa", "bank")
    assert parse_numbers("--ranks", "2,4, 8") == (2, 4, 8)
    assert parse_numbers("--ranks", "") == ()
    with pytest.raises(UsageError, match="'fedid' is unknown; known: fedit, ffa"):
        parse_names("--methods", "fedid", METHODS)
    with pytest.raises(UsageError, match="--orders: 'second' is unknown; known: first, zeroth"):
        parse_names("--orders", "first,second", ("first", "zeroth"))
    for text in ("2,x", "-1"):
        with pytest.raises(UsageError, match=r"--ranks .* write numbers like 2,4,8"):
            parse_numbers("--ranks", text)


def test_rules_and_methods_of_split_learning_are_not_mixed():
    """They train different models, so their scores say nothing of each other."""
    assert is_tuning("fedit,BANK")
    assert not is_tuning("sl,nothing")
    with pytest.raises(UsageError, match="fedit tunes a base model, and sl trains a model anew"):
        is_tuning("sl,fedit")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--methods", "fedit"), "--methods fedit: needs --base"),
        (("--methods", "fedit", "--base", ".", "--auxiliary", "x"), "--auxiliary is of split"),
        (("--methods", "fedit", "--base", ".", "--format", "fp32"), "--format is of split"),
        (("--methods", "fedit", "--base", "."), "--base .: there is no config.json"),
        (("--methods", "sl", "--ranks", "2"), "--ranks needs --base MODEL_DIR"),
        (("--methods", "sl", "--eval", "."), "--eval needs --base MODEL_DIR"),
        (("--methods", "sl", "--data", "."), "--data: give one"),
        (("--methods", "sl,fedit"), "compare them apart"),
        (("--methods", "sl,fedit", "--base", "."), "compare them apart"),
        (("--methods", ","), "name at least one of sl"),
        (("--methods", "sl", "--model", "vgg"), "'vgg' is unknown; known: small-cnn, resnet18"),
        (("--methods", "sl", "--target-accuracy", "0"), "above 0 and at most 1"),
        (("--methods", "sl", "--target-accuracy", "nan"), "not a finite number"),
        (("--methods", "sl", "--target-loss", "1"), "has --target-accuracy instead"),
        (("--methods", "sl", "--alpha", "0"), "'--alpha'"),
        (("--methods", "sl", "--net", "moon"), "a profile of the network"),
        (("--methods", "sl", "--png", "x.xyz"), "call it x.xyz.png"),
        (("--methods", "sl", "--png", "no/x.png"), "there is no directory"),
        (("--methods", "sl", "--json", "no/x"), "there is no directory"),
        (("--methods", "sl", "--json", "/"), "is a directory"),
    ],
)
def test_bad_options_are_one_line_before_anything_is_trained(
    more, words, tmp_path, monkeypatch, capsys
):
    """An option without effect would mislead; after the last method, hours would be lost."""
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "--data", ".", *more]) == 2
    out, err = capsys.readouterr()
    assert words in err
    assert err.count("\n") == 1
    assert not out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["--json", "out.json"], ["--json=out.json"], ["--json"]])
def test_errors_go_where_people_read_them_when_json_goes_to_a_file(tmp_path, capsys, words):
    """Standard output is a table for people, so an error there is no JSON object."""
    data = str(tmp_path / "none")
    assert main(["compare", "--methods", "fedavg", "--data", data, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_link_is_written_as_rate_and_delay():
    """Named profiles are the laboratory's."""
    with pytest.raises(UsageError, match="--net 'moon': a profile of the network laboratory"):
        net_of("moon")
    assert "45 ms each way" in net_of("200mbit,45ms").words
    with pytest.raises(UsageError, match="no setting 'los'"):
        net_of("dsl:los=0%")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    """The check comes before any training."""
    from fsl_async.errors import to_install

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=re.escape(to_install("plot"))):
        check_plot(tmp_path / "x.png")
