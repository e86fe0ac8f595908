"""`fsl-node --role client ADDRESS`: join a run and train."""

from __future__ import annotations

import contextlib
import os
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, fields_dict

from fsl_async.commands.output import Output
from fsl_async.config import address as addresses
from fsl_async.config.load import threads_here
from fsl_async.config.site_policy import SiteChoices, listed
from fsl_async.errors import DataError, TooShortError, UsageError, program
from fsl_async.process.memory import keep_freed_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from fsl_async.commands.node import NodeOptions
    from fsl_async.config.settings import Config
    from fsl_async.nodes.client.client_node import Summary
    from fsl_async.nodes.client.parts import ClientOptions
    from fsl_async.process.notices import Notice
    from fsl_async.process.stopper import Stopper


def command(options: NodeOptions) -> int:
    """Check the options, then run the client; returns the exit code."""
    from fsl_async.cluster.name_slot import check_name, claim_name
    from fsl_async.keys.dialling import keys_for_dialling
    from fsl_async.keys.folder import KeysFolder, site_policy
    from fsl_async.process.stopper import Stopper

    if options.address is None:
        raise UsageError(
            "which server? The server prints the line, like:"
            f" {program()} --role client {addresses.EXAMPLE}"
        )
    server = addresses.parse(options.address)
    site = _site(options, server)
    if options.max_restarts is not None and options.ranks is None:
        raise UsageError("--max-restarts goes with --ranks N")
    if options.evaluate and (options.ranks or options.order or options.rank or options.layers):
        raise UsageError("--evaluate trains nothing: leave out --ranks, --order, --rank, --layers")
    output = Output(as_json=options.as_json, waits=False)
    if site.data is not None and site.task is None:
        for line in _read_data(site.data, site):
            output.say(line)
    with contextlib.ExitStack() as stack:
        if options.name is None:
            slot = stack.enter_context(contextlib.closing(claim_name(server.tcp)))
            site = evolve(site, name=slot.name)
        check_name(site.name)
        found = keys_for_dialling(server, options.keys, insecure=options.insecure)
        policy = site_policy(found or KeysFolder(), options.allow)
        refuses = policy.refuses_rollback and not options.accept_rollback
        site = evolve(site, keys=found, policy=evolve(policy, refuses_rollback=refuses))
        if options.dry_run:
            if site.task is not None:  # as a run does before it dials
                from fsl_async.learn.user_code import load_task

                load_task(site.task)
            output.result(_shown(site, server, options.ranks))
            return 0
        keep_freed_blocks()
        stopper = Stopper()
        with _preemptible(stopper, output, options.grace_s, ec2=options.ec2_spot):
            summary = _join(site, options, stopper, output)
    output.result(summary)
    return stopper.exit_code


def _site(options: NodeOptions, server: addresses.Address) -> ClientOptions:
    """Check what the command line names. Keys and policy are not read yet. Raises UsageError."""
    from fsl_async.nodes.client.parts import ClientOptions

    task, base = options.task, options.base
    task = check_task(task) if task else None
    return ClientOptions(
        server.fsl if server.key or server.split else server.tcp,
        options.name or "",
        task,
        check_data(options.data) if options.data else None,
        tokenizer=check_tokenizer(options.tokenizer, task, base) if options.tokenizer else None,
        threads=options.threads,
        model=check_task(options.model, "--model") if options.model else "",
        auxiliary=check_task(options.auxiliary, "--auxiliary") if options.auxiliary else "",
        base=str(check_base(base)) if base is not None else "",
        rank=options.rank or 0,
        order=options.order,
        layers=options.layers or "",
        evaluates=options.evaluate,
        reward=options.reward or "",
        columns=check_columns(options.columns, has_base=base is not None),
        run_dir=options.run_dir,
    )


def _shown(site: ClientOptions, server: addresses.Address, ranks: int | None) -> dict[str, Any]:
    """Return the result of --dry-run."""
    return (
        {"role": "client", "server": server.fsl, "name": site.name, "data": site.data or ""}
        | {"task": site.task or "", "run_dir": str(site.run_dir or "")}
        | ({} if site.tokenizer is None else {"tokenizer": site.tokenizer})
        | {"threads": threads_here(site.threads or 0), "allow": listed(site.policy.allowed)}
        | ({} if ranks is None else {"ranks": ranks})
        | {key: value for key in fields_dict(SiteChoices) if (value := getattr(site, key))}
    )


def _join(site: ClientOptions, options: NodeOptions, stopper: Stopper, output: Output) -> Summary:
    """Train here, or in the processes of --ranks."""
    if options.ranks is None:
        from fsl_async.nodes.client.joining import join_run

        return join_run(site, stop=stopper, log=output.say)
    from fsl_async.nodes.client.gang import RESTARTS, run_gang

    again = RESTARTS if options.max_restarts is None else options.max_restarts
    return run_gang(
        site, options.ranks, again, stop=stopper, log=output.say, as_json=output.as_json
    )


@contextlib.contextmanager
def _preemptible(
    stopper: Stopper, output: Output, grace_s: float | None, *, ec2: bool
) -> Iterator[None]:
    """Signals, Slurm and EC2 ask `stopper`; what a hard stop cuts off raises nothing else."""
    from fsl_async.process.notices import of_signal, slurm_job
    from fsl_async.process.stopper import stop_on_signals
    from fsl_async.process.watches import watching

    job = slurm_job(os.environ)
    if job is not None:
        output.say(job.words)

    def notices(signal: str) -> Notice:
        return of_signal(signal, job, grace_s, time.time())

    with (
        stop_on_signals(stopper, at_once=True, as_json=output.as_json, notices=notices),
        watching(stopper, job, grace_s, ec2=ec2, say=output.say),
    ):
        try:
            yield
        except BaseException:
            if not stopper.hard:
                raise
            raise stopper.error() from None


def check_task(task: str, option: str = "--task") -> str:
    """Return an absolute `file.py:function`; raises UsageError when there is no such file."""
    file_name, colon, function = task.rpartition(":")
    if not colon or not file_name.endswith(".py") or not function.isidentifier():
        raise UsageError(
            f"{option} {task}: write it as file.py:function, for example train.py:train"
        )
    path = Path(file_name).expanduser()
    if not path.is_file():
        raise UsageError(f"{option} {task}: no such file {path}")
    return f"{path.resolve()}:{function}"


def _check_readable(data: str) -> None:
    """Raise DataError for data that are damaged, or too short for any model.

    What is streamed is looked at when the run has welcomed the client.
    """
    from fsl_async.learn.data.corpus import Corpus
    from fsl_async.learn.data.facts import is_text, open_dataset
    from fsl_async.learn.data.sources import location_of, open_documents

    found = location_of(data)
    if found.kind in {"jsonl", "parquet"}:
        open_documents(found, 0.0)
    elif found.kind == "saved":
        try:  # of images and labels in split learning, of texts in pretraining
            open_dataset(found.path)
        except DataError:
            open_documents(found, 0.0)
    elif found.kind == "text" and is_text(Path(data)):
        try:
            Corpus.open(data, context=1)  # the run sets the length of a window
        except TooShortError as error:
            raise DataError(
                f"data {data!r} has {error.bytes} bytes, fewer than the smallest model needs: give"
                " more text"
            ) from None
    elif found.kind == "text":
        open_dataset(data)


def _read_data(data: str, site: ClientOptions) -> list[str]:
    """Read the data of a built-in task before the parameter server is dialed.

    Returns lines about the records of fine-tuning. Raises DataError.
    """
    if site.base:
        from fsl_async.learn.tune.records import check_records

        return check_records(data, site.columns)
    _check_readable(data)
    return []


def check_columns(columns: str | None, *, has_base: bool) -> str:
    """Return `--columns`, empty where it is not given. Raises UsageError."""
    from fsl_async.learn.tune.records import parse_columns

    if not columns:
        return ""
    if not has_base:
        raise UsageError("--columns names columns of records: it goes with --base MODEL")
    try:
        parse_columns(columns)
    except DataError as error:
        raise UsageError(error.message) from None
    return columns


def check_tokenizer(tokenizer: str, task: str | None, base: Path | None) -> str:
    """Return an absolute path, or a name at the hub. Raises UsageError beside a task or a base."""
    if task is not None or base is not None:
        other = "--task" if task is not None else "--base"
        raise UsageError(f"--tokenizer is of the built-in pretraining: leave out it or {other}")
    path = Path(tokenizer).expanduser()
    return str(path.resolve()) if path.exists() else tokenizer


def check_corpus(config: Config, options: Mapping[str, str]) -> None:
    """Raise DataError when the run's text is here and cannot be cut into its shards.

    A server need not have it at all. config: resolved, so that the model's context is known.
    options: dotted key -> the option to name instead.
    """
    from fsl_async.learn.data.corpus import Corpus
    from fsl_async.learn.data.facts import is_text
    from fsl_async.learn.data.sources import location_of

    path = config.data.path
    if not path or config.train.task or config.tune.is_on or not Path(path).exists():
        return
    if not config.split.is_on and (config.model.tokenizer or location_of(path).kind != "text"):
        return
    if config.split.is_on and not is_text(Path(path)):
        return  # the parameter server describes it when it starts
    try:
        corpus = Corpus.open(path, context=config.model.context, held_out=config.data.holdout)
        corpus.shard(0, 1 if config.data.sharding == "local" else config.shards)
    except DataError as error:
        text = error.message
        for key, option in options.items():
            text = text.replace(key, option)
        raise DataError(text) from None


def check_base(base: Path) -> Path:
    """Return the absolute path of a base model. Raises UsageError where there is none."""
    path = base.expanduser()
    if not path.exists():
        raise UsageError(f"--base {base}: no such file or directory")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UsageError(
            f"--base {base}: there is no config.json; give a folder in Hugging Face's format, as"
            " save_pretrained writes it"
        )
    return path.resolve()


def check_data(data: str) -> str:
    """Return an absolute path with its column, or hf:// and more, as it is.

    Raises UsageError where nothing is there that we may read.
    """
    from fsl_async.learn.data.sources import is_streamed, location_of, split_column

    if is_streamed(data):
        try:
            location_of(data)
        except DataError as error:
            raise UsageError(f"--{error.message}") from None
        return data
    name, column = split_column(data)
    path = Path(name).expanduser()
    try:
        kind = path.stat().st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            # Opening a pipe waits until another process writes to it, perhaps for ever.
            raise UsageError(
                f"--data {data}: neither a file nor a directory; give a regular file, or a"
                " directory of them"
            )
        (os.scandir(path) if path.is_dir() else path.open("rb")).close()
    except FileNotFoundError:
        raise UsageError(f"--data {data}: no such file or directory") from None
    except OSError as error:
        raise UsageError(f"--data {data}: {error.strerror}") from None
    return f"{path.resolve()}:{column}" if column else str(path.resolve())
