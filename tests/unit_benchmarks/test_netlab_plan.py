"""The pure part of the laboratory: settings, words for tc, the plan of links, the router's
archive.
"""

import re

import pytest
from netlab import __main__ as netlab
from netlab import host, laboratory, netem, plan, records
from netlab.profiles import LinkSettings, changed, profile, words

from fsl_async.errors import UsageError


def test_words_of_tc():
    """Every setting reaches tc with a unit; an omitted one would keep its old value."""
    settings = LinkSettings(
        delay_ms=20,
        jitter_ms=15,
        loss_percent=2,
        rate_mbit=20,
        duplicate_percent=1,
        reorder_percent=3,
        queue_ms=100,
    )
    assert " ".join(netem.arguments(settings)) == (
        "netem limit 223 delay 20.000ms 15.000ms loss 2% duplicate 1% reorder 3% rate 20000kbit"
    )
    assert "loss 100% duplicate" in " ".join(netem.arguments(settings, cut=True))
    perfect = " ".join(netem.arguments(LinkSettings()))
    assert perfect.endswith("delay 0.000ms loss 0% rate 100000000kbit")


def test_bursts_have_the_loss_and_the_length():
    """The stationary share of the bad state is the loss, its mean length the burst."""
    begin, end = netem.gilbert(2, 4)
    assert end == 25
    assert begin / (begin + end) == pytest.approx(0.02)
    arguments = netem.arguments(LinkSettings(loss_percent=2, burst_packets=4))
    assert arguments[5:9] == ("loss", "gemodel", "0.510204%", "25%")


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("delay=-1", "a number with ms or s or us"),
        ("delay=1km", "a number with ms or s or us"),
        ("speed=1", "no setting 'speed'; settings: delay"),
        ("moon", "no profile 'moon'; profiles: lan"),
        ("loss=100", "loss=100 is not from 0 to 90"),
        ("jitter=5", "more than delay"),
        ("reorder=5", "needs a delay"),
        ("burst=0", "not from 1"),
    ],
)
def test_nonsense_is_refused(word, says):
    """One line with the valid settings, before anything is changed."""
    with pytest.raises(UsageError, match=re.escape(says)):
        changed(LinkSettings(), word)


def test_rates_of_the_two_directions():
    """`up` is toward the first site; a rate is that of both."""
    uneven = profile("dsl:up=2mbit:down=50mbit")
    assert words(uneven).startswith("2 Mbit/s up, 50 Mbit/s down, 30 ms")
    assert netem.arguments(uneven.up) == netem.arguments(changed(profile("dsl"), "rate=2"))
    assert netem.arguments(uneven.down) == netem.arguments(changed(profile("dsl"), "rate=50"))
    assert words(profile("lan:up=2")).startswith("2 Mbit/s up, no limit down")
    assert changed(uneven, "rate=10") == profile("dsl") == changed(uneven, "dsl")


def test_a_star():
    """The first site is in the middle; each site has one address and a route to its neighbors
    only.
    """
    lab = plan.make("lab", ["ps", "a", "b"])
    assert list(lab.links) == ["ps:a", "ps:b"]
    lines = plan.site_lines(lab, lab.site("b"))
    assert "address replace 10.77.0.3/32 dev lo" in lines
    assert "route replace 10.77.0.1/32 dev link1 src 10.77.0.3" in lines
    assert not any("10.77.0.2" in line for line in lines)
    (link,) = lab.chosen("b")
    assert link is lab.chosen("b:ps")[0] is lab.between("b", "ps")
    neighbor = next(line for line in lines if line.startswith("neighbor"))
    assert neighbor.endswith(f"lladdr {link.ends[0].mac} dev link1 nud permanent")  # the other end
    assert len(lab.chosen("all")) == 2


@pytest.mark.parametrize(
    ("name", "sites", "pairs", "says"),
    [
        ("Lab!", ["a", "b"], None, "does not name a laboratory"),
        ("lab", ["a"], None, "2 to 200 sites"),
        ("lab", ["a", "all"], None, "does not name a site"),
        ("lab", ["a", "b;rm"], None, "does not name a site"),
        ("lab", ["a", "a"], None, "the same name"),
        ("lab", ["a", "b"], [("a", "c")], "which is no site"),
        ("lab", ["a", "b"], [("a", "b"), ("b", "a")], "two sites once"),
        ("lab", ["a", "b"], [], "needs a link"),
    ],
)
def test_plans_that_cannot_be(name, sites, pairs, says):
    """Names are passed to programs as root, so they are checked first."""
    with pytest.raises(UsageError, match=says):
        plan.make(name, sites, pairs)


def test_missing_root_rights_are_reported(monkeypatch, capsys):
    """One line and exit code 2, before anything is touched."""
    from netlab.__main__ import main

    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["up"]) == 2
    assert capsys.readouterr().err == (
        "error: a laboratory needs root (network namespaces); run this with sudo\n"
    )


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Make a folder for laboratories, for a user who may make them, on a machine without any."""
    monkeypatch.setattr(records, "ROOT", tmp_path / "labs")
    for module in (host, netlab):
        monkeypatch.setattr(module, "require", lambda: None)
        monkeypatch.setattr(module, "namespaces", list)
    return tmp_path / "labs"


@pytest.mark.parametrize("name", ["{victim}", "../victim", "..", ".", "", "a/b", "A"])
def test_down_removes_no_folder_but_a_laboratorys(root, tmp_path, capsys, name):
    """It runs as root: a path such as `--name /home/me` is refused and its folder kept."""
    victim = tmp_path / "victim"
    for folder in (victim, root / "other", root / "a" / "b"):
        folder.mkdir(parents=True)
        (folder / "file").write_text("precious")
    assert netlab.main(["down", "--name", name.replace("{victim}", str(victim))]) == 2
    assert "does not name a laboratory" in capsys.readouterr().err
    kept = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("file"))
    assert kept == ["labs/a/b/file", "labs/other/file", "victim/file"]
    assert not list(tmp_path.rglob("lock"))


def test_folders_of_others_are_no_laboratories(root):
    """Other folders with a file of the same name are left alone by `down --all` and by `up`."""
    for name in ("lab", "Not a lab"):
        (root / name).mkdir(parents=True)
        (root / name / "state.json").write_text("{}")
    assert records.names() == ["lab"]


def test_a_laboratory_that_is_not_there(root, capsys):
    """To take it down changes nothing and raises nothing."""
    assert netlab.main(["down", "--name", "lab"]) == 0
    assert "no laboratory lab" in capsys.readouterr().out
    assert not root.exists()
    assert laboratory.remove("lab") is False
