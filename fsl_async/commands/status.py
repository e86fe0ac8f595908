"""`fsl-node status RUN_DIR`: what a run does or did, rebuilt from its journals.

RUN_DIR is that of a parameter server, of a split server, of a process that is both, with a folder
for each, or of a client.

While it runs, trackers and a page for Prometheus get what is new in the journals.
"""

from __future__ import annotations

import contextlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import click

from fsl_async.commands.options import RunDir, Whole, WithJson, argument, option, takes
from fsl_async.commands.output import Output
from fsl_async.errors import UsageError, one_line, to_install

if TYPE_CHECKING:
    from fsl_async.commands.status_report import NodeStatus
    from fsl_async.tools.trackers.outbox import Outbox, Tracker
    from fsl_async.tools.trackers.prometheus import Page


JOURNAL = "journal.jsonl"
POLL_S = 0.5
SETTLE_S = 2.0
"""Slack between starts: two servers in one process do not begin their journals at once."""
PORT = 9720
"""The default of `fsl_async.tools.trackers.prometheus`; a test compares them."""
PROJECT = "fsl-async"
_FOLDERS = ("", "ps", "server")
"""Where journals are in a run directory."""
_MOST_TEXT = 500
_NEEDS = {
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "metrics": ("prometheus_client", "prometheus"),
}
"""Option -> package, and the extra that has it."""


class StatusOptions(WithJson):
    """The options of `fsl-node status`."""

    run_dir: Path = argument(RunDir())
    follow: bool = option("Go on until the run ends, or Ctrl-C.")
    port: int | None = option(
        "Show it as a page in a browser, on this machine only, until Ctrl-C. PORT: any free one.",
        Whole(0, 65535), "[PORT]", name="--web", is_flag=False, flag_value=0,
    )  # fmt: skip
    tensorboard: Path | None = option(
        "Write a point for each version to DIR, for TensorBoard.",
        click.Path(path_type=Path, file_okay=False), "DIR",
    )  # fmt: skip
    wandb: str | None = option(
        "Send them to Weights & Biases; WANDB_MODE=offline keeps them in ./wandb.",
        metavar="[PROJECT]", is_flag=False, flag_value=PROJECT,
    )  # fmt: skip
    mlflow: str | None = option("Send them to an MLflow server or database.", metavar="URI")
    metrics: int | None = option(
        f"Serve figures for Prometheus on 127.0.0.1 ({PORT}) until the run ends.",
        Whole(0, 65535), "[PORT]", is_flag=False, flag_value=PORT,
    )  # fmt: skip

    @property
    def asks_trackers(self) -> bool:
        """Whether a tracker or the page for Prometheus is asked for."""
        return any(getattr(self, name) is not None for name in _NEEDS)


def check(asked: StatusOptions) -> None:
    """Raise UsageError for what cannot work, before anything is waited for."""
    for name, (package, extra) in _NEEDS.items():
        if getattr(asked, name) is not None and importlib.util.find_spec(package) is None:
            raise UsageError(
                f"--{name} needs {package}, which is not installed: {to_install(extra)}"
            )
    for name in ("wandb", "mlflow"):
        if getattr(asked, name) == "":
            raise UsageError(f"--{name} is empty: give a value")


def wait_for_journal(run_dir: Path, output: Output) -> None:
    """Wait until a server that is not started yet has written a line in `run_dir`.

    A directory that has others in it is not waited for: the caller refuses it.
    """
    places = [run_dir / part / JOURNAL for part in _FOLDERS]
    notified = False
    while not any(map(_has_line, places)):
        others = {one.parent.name for one in run_dir.glob(f"*/{JOURNAL}")}.difference(_FOLDERS)
        if others or run_dir.is_file():
            return
        if not notified:
            output.say(f"waits for {places[0]}")
        notified = True
        time.sleep(POLL_S)
    if notified and not _has_line(places[0]):
        time.sleep(SETTLE_S)


def wait_until_gone(status: NodeStatus, poll: Callable[[], None]) -> None:
    """Poll until the node is gone for good, or Ctrl-C."""
    from fsl_async.observe.node_folders import is_gone

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            poll()
            if is_gone(status.state.node, time.time()):
                return
            time.sleep(POLL_S)
            status.read()


def _has_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.readline(1 << 30).endswith(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return False


def _opened_page(port: int) -> Page:
    from fsl_async.tools.trackers.prometheus import Page

    try:
        return Page(port)
    except OSError as error:
        raise UsageError(
            f"--metrics {port}: {error.strerror or error}; give another port, or 0 for any"
        ) from None


def _trackers(asked: StatusOptions, run: str) -> Iterator[Tracker]:
    """Open the trackers that are asked for. Raises UsageError."""
    if asked.tensorboard is not None:
        from fsl_async.tools.trackers.tensorboard import TensorBoard

        where = f"--tensorboard {asked.tensorboard}"
        yield _opened(where, partial(TensorBoard, asked.tensorboard / run))
    if asked.wandb is not None:
        from fsl_async.tools.trackers.weights_and_biases import WeightsAndBiases, folder_of

        where = f"--wandb {asked.wandb}"
        yield _opened(where, partial(WeightsAndBiases, asked.wandb, run, folder_of()))
    if asked.mlflow is not None:
        from fsl_async.tools.trackers.mlflow import MLflow

        where = f"--mlflow {asked.mlflow}"
        yield _opened(where, partial(MLflow, asked.mlflow, run), asked.mlflow)


def _opened(option: str, make: Callable[[], Tracker], uri: str = "") -> Tracker:
    try:
        return make()
    except Exception as error:
        text = f"{option} cannot be opened: {type(error).__name__}: {error}"
        raise UsageError(one_line(without_password(text, uri))[:_MOST_TEXT]) from error


def without_password(text: str, uri: str) -> str:
    """The text without what a URI has before the @: libraries repeat it in their errors."""
    user, at, _ = urlsplit(uri).netloc.rpartition("@")
    return text.replace(user + at, "") if user else text


def _warn(output: Output, asked: StatusOptions, problem: str) -> None:
    if problem:
        output.warn(one_line(without_password(problem, asked.mlflow or "")))


@contextlib.contextmanager
def watching(
    nodes: Sequence[NodeStatus], asked: StatusOptions, output: Output
) -> Iterator[Callable[[], None]]:
    """Open the trackers and the page that are asked for; give a function to call often.

    It hands them what is new in the journals. They get the rest when the block ends.
    """
    from fsl_async.observe.node_folders import is_gone
    from fsl_async.tools.trackers.outbox import Feed, Outbox, run_name

    boxes: list[Outbox] = []
    page: Page | None = None

    def send() -> None:
        for box in boxes:
            _warn(output, asked, box.send(time.monotonic()))

    def end(box: Outbox) -> None:
        _warn(output, asked, box.close(time.monotonic()))

    with contextlib.ExitStack() as stack:
        for tracker in _trackers(asked, run_name(nodes[0].state.node, nodes[0].folder)):
            boxes.append(Outbox(tracker))
            stack.callback(end, boxes[-1])
            output.say(f"{tracker.name}: {tracker.where}")
        if asked.metrics is not None:
            page = stack.enter_context(contextlib.closing(_opened_page(asked.metrics)))
            output.say(f"metrics: {page.url}")
            output.record("metrics", url=page.url)
        feeds = [Feed(one.folder, boxes, send) for one in nodes if asked.asks_trackers]

        def poll() -> None:
            for feed in feeds:
                feed.poll()
            if page is not None:
                now = time.time()
                page.show([one.reading(up=not is_gone(one.node, now)) for one in feeds])

        poll()
        yield poll


_CLIENTS_EVERY_S = 10.0


@click.command("status")
@takes(StatusOptions)
def command(options: StatusOptions) -> int:
    """Show a run, running or finished, from RUN_DIR/journal.jsonl and the files beside it.

    Reads only; works while the server runs, after it was killed, and on a copy of the directory.
    """
    from fsl_async.commands.status_report import NodeStatus, facts, lines
    from fsl_async.observe.node_folders import run_dir_of, servers_of

    output, run_dir = Output(as_json=options.as_json), options.run_dir
    if options.port is not None:
        if options.follow or options.asks_trackers:
            raise UsageError(
                "--web is a program of its own: start --follow and trackers in another terminal"
            )
        return _web(run_dir_of(run_dir), options.port, output)
    if options.asks_trackers:
        check(options)
        wait_for_journal(run_dir, output)
    first, *others = (NodeStatus(folder) for folder in servers_of(run_dir_of(run_dir)))
    with watching([first, *others], options, output) as poll:
        if options.follow:
            _follow(first, output, poll)
        elif options.metrics is not None:
            wait_until_gone(first, poll)
    now = time.time()
    found = facts(first, now)
    for one in others:
        found["split_server"] = facts(one, now)
    shown = [*lines(first, now), *(line for one in others for line in ("", *lines(one, now)))]
    output.answer(found, *shown)
    return 0


def _web(run_dir: Path, port: int, output: Output) -> int:
    """Serve the page until Ctrl-C."""
    from fsl_async.tools.control_room import server

    def announce(url: str) -> None:
        if output.as_json:
            output.record("web", url=url)
        output.say(f"open {url} in a browser on this machine (Ctrl-C ends the page, not the run)")

    server.run(run_dir, port, announce)
    return 0


def _follow(status: NodeStatus, output: Output, poll: Callable[[], None]) -> None:
    """Show what happens until the node is gone for good, or Ctrl-C.

    The table of clients is printed at the beginning and after a version, at most every
    `_CLIENTS_EVERY_S`. poll: called after each look at the journal.
    """
    from fsl_async.commands.status_report import table
    from fsl_async.observe.table import show_news

    state, news, clients_at = status.state, status.news, -_CLIENTS_EVERY_S
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            show_news(output, state, news)
            poll()
            if state.node.ended_at is not None:
                return
            is_due = time.monotonic() >= clients_at + _CLIENTS_EVERY_S
            is_new = clients_at < 0 or any(one.kind == "version" for one in news)
            if not output.as_json and state.clients and is_due and is_new:
                clients_at = time.monotonic()
                for line in table(state, time.time()):
                    output.say(line)
            time.sleep(POLL_S)
            news = status.read()
