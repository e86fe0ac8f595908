"""What may leave a site: kinds, the needs of a configuration, and the site file.

Hostile parameter servers are in unit_nodes/split.
"""

import pytest

from fsl_async.config.load import load
from fsl_async.config.site_policy import KINDS, SitePolicy, needs_of, parse_kinds, receivers_of
from fsl_async.errors import KeysError, NotAllowedError, UsageError
from fsl_async.keys.folder import KeysFolder, site_policy

SPLIT = ("split.method=cse-fsl",)


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ((), ("deltas",)),
        (("split.method=fedavg",), ("deltas",)),
        (("split.method=fedavg", "split.lora_client=4"), ("adapters",)),
        (SPLIT, ("deltas", "activations", "labels")),
        (("split.method=sl",), ("deltas", "activations", "labels")),
        (("split.method=sl", "split.labels_at_home=true"), ("deltas", "activations")),
        ((*SPLIT, "split.lora_client=4"), ("adapters", "activations", "labels")),
        # This auxiliary model has no adapters: its weights travel whole.
        (
            (*SPLIT, "split.lora_client=4", "split.auxiliary=linear"),
            ("deltas", "activations", "labels"),
        ),
    ],
)
def test_what_a_configuration_needs(settings, needs):
    """The list must have every kind that the method sends."""
    assert needs_of(load(None, settings)) == needs


def test_by_default_only_deltas_leave():
    """By default a site must not lose more than pretraining needs."""
    policy = SitePolicy()
    policy.require({"deltas": "x", "adapters": "x", "scalars": "x"}, "run r")
    let = [kind for kind in KINDS if policy.lets(kind)]
    assert let == ["deltas", "adapters", "scalars", "sums"]
    with pytest.raises(NotAllowedError) as refused:
        policy.require(receivers_of(load(None, SPLIT), "ps:1", "split:2"), "run r")
    assert refused.value.exit_code == 2
    assert refused.value.message == (
        "run r needs activations and labels sent to the split server at split:2, and this site "
        "allows deltas only;"
        " to allow that, start this client with --allow deltas,activations,labels"
    )


def test_adapters_alone_do_not_allow_full_weights():
    """To allow adapters is not to allow changes of all weights."""
    with pytest.raises(NotAllowedError, match="needs deltas sent to the parameter server at ps:1"):
        SitePolicy(frozenset({"adapters"})).require(receivers_of(load(None), "ps:1", ""), "run r")


@pytest.mark.parametrize("allowed", [*KINDS, "deltas,sums", "adapters,sums"])
@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        (("tune.method=lora",), "adapters"),
        (("tune.method=lora", "tune.full=head"), "deltas"),
        (("tune.method=zeroth",), "scalars"),
    ],
)
@pytest.mark.parametrize("secure", ["true", "false"])
def test_sums_let_out_masked_deltas_alone(allowed, settings, kind, secure):
    """Whatever a run sends of weights; the other kinds mean what they mean without masks."""
    config = load(None, [*settings, f"tune.secure={secure}"])
    policy, needed = SitePolicy(parse_kinds(allowed, "x")), receivers_of(config, "ps:1", "")
    assert list(needed) == [kind]
    others = SitePolicy(policy.allowed - {"sums"})
    if others.lets(kind) or ("sums" in policy.allowed and secure == "true"):
        policy.require(needed, "run r", masked=config.tune.secure)
        return
    with pytest.raises(NotAllowedError, match=f"needs {kind}") as refused:
        policy.require(needed, "run r", masked=config.tune.secure)
    assert ("without masks" in refused.value.message) == ("sums" in policy.allowed)


def test_sums_let_out_nothing_else():
    """An evaluator gets single deltas; labels and activations are not masked."""
    policy = SitePolicy(frozenset({"sums"}))
    beyond = [kind for kind in KINDS if not policy.lets(kind, masked=True)]
    assert beyond == ["activations", "labels", "metrics", "embeddings", "copies", "answers"]


@pytest.mark.parametrize("text", ["", "deltas,", "Deltas", "deltas;labels", "all", "deltas, smell"])
def test_a_kind_that_does_not_exist_is_named(text):
    """A typing error must not be read as fewer or more kinds."""
    with pytest.raises(UsageError, match=r"^--allow: .*; the kinds are deltas, adapters, scalars"):
        parse_kinds(text, "--allow")


class TestSiteFile:
    """site.toml beside the keys."""

    @pytest.fixture
    def folder(self, tmp_path):
        """An empty keys folder."""
        tmp_path.chmod(0o700)
        return KeysFolder(tmp_path)

    def write(self, folder, text, mode=0o644):
        """Make the site file."""
        path = folder.path / "site.toml"
        path.write_text(text)
        path.chmod(mode)

    def test_without_it_the_command_line_decides(self, folder):
        """As for all settings of a site."""
        assert site_policy(folder, None).allowed == {"deltas"}
        assert site_policy(folder, "deltas,labels").allowed == {"deltas", "labels"}
        assert site_policy(KeysFolder(folder.path / "none"), None).allowed == {"deltas"}

    def test_the_command_line_may_only_narrow_it(self, folder):
        """The administrator's list holds for every user and script of the site."""
        self.write(folder, 'allow = ["deltas", "metrics", "activations"]')
        assert site_policy(folder, None).allowed == {"deltas", "metrics", "activations"}
        assert site_policy(folder, "deltas").allowed == {"deltas"}
        assert site_policy(folder, "adapters").allowed == {"adapters"}
        assert site_policy(folder, "sums").allowed == {"sums"}
        with pytest.raises(
            UsageError, match=r"site\.toml allows deltas,activations,metrics only"
        ) as wider:
            site_policy(folder, "deltas,labels")
        assert wider.value.exit_code == 2
        with pytest.raises(NotAllowedError, match=r"site\.toml and --allow must list deltas,"):
            site_policy(folder, "deltas").require({"labels": "x"}, "run r")

    def test_it_may_refuse_to_go_back_with_a_run(self, folder):
        """By default a client goes back, with a line."""
        assert not site_policy(folder, None).refuses_rollback
        for value in ("true", "false"):
            self.write(folder, f'allow = ["deltas"]\naccept_rollback = {value}')
            assert site_policy(folder, None).refuses_rollback == (value == "false")

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("allow = deltas", "not valid TOML"),
            ('allow = "deltas"', "write allow as a list"),
            ("", "write allow as a list"),
            ("allow = []", "no kind of data is given"),
            ("allow = [1]", "'' is no kind of data"),
            ('allow = ["everything"]', "'everything' is no kind of data"),
            ('alow = ["deltas"]', "unknown key 'alow'"),
            ('allow = ["deltas"]\naccept_rollback = 0', "accept_rollback is true or false"),
        ],
    )
    def test_a_file_that_cannot_be_read_allows_nothing(self, folder, text, problem):
        """A typing error must not fall back to a default."""
        self.write(folder, text)
        with pytest.raises((KeysError, UsageError), match=problem) as refused:
            site_policy(folder, None)
        assert "site.toml" in refused.value.message

    def test_a_file_that_others_can_change_is_refused(self, folder):
        """Otherwise any user of the machine decides what leaves it."""
        self.write(folder, 'allow = ["deltas"]', 0o666)
        with pytest.raises(KeysError, match="can be changed by others"):
            site_policy(folder, None)

    def test_a_broken_link_allows_nothing(self, folder):
        """An administrator's file on an unmounted share is not the same as no file."""
        (folder.path / "site.toml").symlink_to(folder.path / "gone" / "site.toml")
        with pytest.raises(KeysError, match="a link to a missing file"):
            site_policy(folder, "labels")

    def test_a_link_into_a_folder_that_others_can_change_is_refused(self, folder, tmp_path):
        """Other users could replace the file."""
        shared = tmp_path / "shared"
        shared.mkdir()
        shared.chmod(0o777)
        (shared / "site.toml").write_text('allow = ["labels"]')
        (folder.path / "site.toml").symlink_to(shared / "site.toml")
        with pytest.raises(KeysError, match="can be changed by others"):
            site_policy(folder, None)

    def test_odd_files_are_one_line(self, folder):
        """They are no bug of this program, and the message has a name, no number."""
        self.write(folder, "allow = " + "[" * 20_000)
        with pytest.raises(KeysError, match="not valid TOML"):
            site_policy(folder, None)
        self.write(folder, '\ufeffallow = ["metrics"]')
        assert site_policy(folder, None).allowed == {"metrics"}
        (folder.path / "site.toml").unlink()
        (folder.path / "site.toml").mkdir()
        with pytest.raises(KeysError, match=r"site\.toml is no file"):
            site_policy(folder, None)
