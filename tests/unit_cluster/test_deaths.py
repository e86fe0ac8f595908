"""Ends of children by their last error: what the one who started them reports."""

from fsl_async.cluster.supervisor import ChildExited, Deaths


def died(name, error="no disk", wait_s=1.0, why="exit code 1"):
    return ChildExited(name, 1, 2.0, wait_s, why, error)


def counted(*ends):
    deaths = Deaths()
    for end in ends:
        deaths.add(end)
    return deaths


def test_each_error_is_one_line_the_most_frequent_first():
    """Twelve ends of one error are one fault, not twelve."""
    deaths = counted(
        died("b", "", why="killed by SIGSEGV"), *[died("b"), died("a")] * 2, died("a", "other")
    )
    assert deaths.lines() == [
        "a, b ended 4 times: no disk",
        "b ended: killed by SIGSEGV",
        "a ended: other",
    ]
    assert deaths
    assert not Deaths()
    assert Deaths().lines() == []


def test_children_are_hopeless_that_end_alike_three_times_or_for_good():
    """Waiting for them would end in a time limit, whose words name the wrong cause."""
    assert not counted(*[died("a")] * 2).are_hopeless(["a"])
    assert counted(*[died("a")] * 3).are_hopeless(["a"])
    assert not counted(died("a"), died("a"), died("a", "other")).are_hopeless(["a"])
    assert not counted(*[died("a")] * 3).are_hopeless(["a", "b"])
    assert counted(*[died("a")] * 3, died("b", wait_s=None)).are_hopeless(["a", "b"])
