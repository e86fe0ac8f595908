"""Joins a run: what the training thread does before and after its task or script.

`join_run` is `fsl-node --role client`, `join` is `fsl_async.join(...)` in a user's script. Both
make a `ClientRuntime`, whose loop has a thread of its own, wait for the parameter server's welcome,
train in the calling thread, and wait at the end until the last delta has arrived.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import attrs

from fsl_async.config import address as addresses
from fsl_async.config.load import OMP_THREADS, threads_here, to_wire
from fsl_async.config.settings import Config
from fsl_async.config.site_policy import Order
from fsl_async.errors import DataError, FslError, StopError, TaskError, UsageError
from fsl_async.keys.dialling import keys_for_dialling
from fsl_async.keys.folder import KeysFolder
from fsl_async.learn.client.context import ClientContext, choose_device
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.ports import RunFinishedError
from fsl_async.learn.client.script_values import whole
from fsl_async.learn.gang.link import Place
from fsl_async.learn.user_code import Task, load_task, own_failure
from fsl_async.nodes.client.client_node import Summary
from fsl_async.nodes.client.gang_joining import JoinedRank, join_ranks
from fsl_async.nodes.client.node import ClientRuntime
from fsl_async.nodes.client.parts import ClientOptions, Membership
from fsl_async.process.memory import MemoryMark
from fsl_async.process.script import current_stopper, errors_in_one_line, leave_at_exit, print_line
from fsl_async.process.stopper import Stopper
from fsl_async.roles.phrasing import counted
from fsl_async.roles.sync.delta import EVALUATE, ROLL_OUT, TRAIN

SPLIT_TASK = "fsl_async.learn.split.task:train"
TASKS = {
    TRAIN: "fsl_async.learn.tune.task:train",
    EVALUATE: "fsl_async.learn.tune.evaluator:evaluate",
    ROLL_OUT: "fsl_async.learn.tune.rollout:roll_out",
}
"""Built-in tasks of fine-tuning, by duty."""
PRIVACY = "privacy"
"""Folder of privacy budgets, in that of the keys."""
STREAMS = "streams"
"""Folder of the states of streamed data, in that of the keys."""


def context_of(
    options: ClientOptions, member: Membership, log: Callable[[str], None]
) -> ClientContext:
    """The context of a task, by the run's configuration and the site's options."""
    # As checked, not as received: what a parameter server adds to its welcome reaches no task.
    config: dict[str, dict[str, Any]] = to_wire(member.config)
    config["data"]["path"] = ""
    config["tune"] = {**config["tune"], "base": options.base}
    if options.model:  # a site runs its own copies only
        config["model"] = {**config["model"], "family": options.model}
    if options.auxiliary:
        config["split"] = {**config["split"], "auxiliary": options.auxiliary}
    if options.threads is not None:  # other programs may run on the site's machine
        config["train"] = {**config["train"], "threads": options.threads}
    if options.data is not None:  # the data's path differs from site to site
        config["data"] = {**config["data"], "path": options.data}
    if options.columns:
        config["data"] = {**config["data"], "columns": options.columns}
    if options.tokenizer is not None:
        config["data"] = {**config["data"], "tokenizer": options.tokenizer}
    keys = (options.keys or KeysFolder()).path
    return ClientContext(
        client_name=options.name,
        seed=member.config.run.seed,
        device=choose_device(options.device or member.config.train.device),
        config=config,
        shard_index=member.welcome.shard,
        shard_count=member.welcome.shards,
        log=log,
        policy=options.policy,
        site=options,
        privacy_folder=keys / PRIVACY,
        position=member.welcome.position,
        states_file=keys / STREAMS / f"{member.welcome.run}-{options.name}.json",
    )


def built_in(config: Config, options: ClientOptions) -> Task:
    """The built-in task. Code and data that are not built in must be named by this site."""
    data = options.data
    if config.train.task:
        raise TaskError(
            "this run trains a task of its own: give this client its copy with"
            " --task FILE.py:FUNCTION"
        )
    if config.tune.is_on:
        if not options.base or data is None:
            missing = "--base MODEL_DIR" if not options.base else "--data PATH"
            raise DataError(
                "this run tunes a base model that every site has, on each site's own data: give"
                f" this client {missing}"
            )
        return load_task(TASKS[options.duty])
    if options.duty == EVALUATE:
        raise TaskError(
            "there is a built-in evaluator for fine-tuning only: give this one --task"
            " FILE.py:FUNCTION, which calls fed.evaluate_deltas"
        )
    if data is None and config.data.source != "built-in":
        raise DataError(
            "this run trains each site on its own data: give this client --data PATH (a parameter"
            " server started with --set data.source=built-in lets clients train on the source of"
            " Python's standard library)"
        )
    return load_task(SPLIT_TASK if config.split.is_on else "")


def start_line(context: ClientContext, threads: int | None) -> str:
    """Set torch's threads; returns a line with their number, and the device."""
    import torch

    settings = context.config.get("train", {})
    count = threads_here(int(settings.get("threads", 0)))
    torch.set_num_threads(count)
    if threads is not None:
        why = "--threads"
    elif settings.get("threads"):
        why = "the run's train.threads"
    elif os.environ.get(OMP_THREADS):
        why = OMP_THREADS
    else:
        why = "as many as there are cores; if others compute here too, give each client --threads N"
    return (
        f"{context.client_name} trains on {context.device} with {counted(count, 'thread')} ({why})"
    )


def join_run(options: ClientOptions, *, stop: Stopper, log: Callable[[str], None]) -> Summary:
    """Join a run and train in this thread until the run ends. Blocks.

    The task is loaded before the parameter server is dialed.
    Raises FslError in one line: refused, interrupted, a task that cannot be loaded or that raised.
    """
    own = load_task(options.task) if options.task else None
    runtime = ClientRuntime(options, stop=stop, log=log)
    error: str | None = None
    try:
        member = runtime.wait_welcome()
        if member.config.split.is_on:
            options.check_code(member.config)
        context = attrs.evolve(context_of(options, member, log), is_leaving=lambda: stop.requested)
        function = own or built_in(member.config, options)
        log(start_line(context, options.threads))
        MemoryMark.take()
        fed = Fed(runtime.training, context, runtime)
        fed.evaluates_in_time = own is None
        function(fed)
    except RunFinishedError:
        pass
    except FslError as failure:
        error = failure.message
        raise
    except Exception as failure:
        error = f"the training function raised {type(failure).__name__}: {failure}"
        known = own_failure(failure)
        if known is None:
            raise
        error = known.message
        raise known from failure
    except BaseException as failure:
        error = f"the training function raised {type(failure).__name__}: {failure}"
        raise
    finally:
        runtime.training_ended(error)
    runtime.raise_failure()
    return runtime.summary()


class Joined(Fed):
    """The result of `fsl_async.join`: a Fed of the caller's script, to close or use in a `with`."""

    def __init__(
        self,
        runtime: ClientRuntime,
        context: ClientContext,
        left: Callable[[], None] = lambda: None,
    ) -> None:
        """left: called after the client has left the run."""
        super().__init__(runtime.training, context)
        self._runtime = runtime
        self._left = left
        self._closed = False
        self._stays = leave_at_exit(self._leave_at_exit)

    def close(self) -> None:
        """Leave the run: wait for the last delta, then end the session. Harmless twice.

        Raises as the end of a `with` block does.
        """
        if not self._closed:
            self.__exit__(None, None, None)

    def _leave(self, error: str | None) -> None:
        if not self._closed:
            self._closed = True
            self._stays()
            try:
                self._runtime.training_ended(error)
            finally:
                self._left()

    def _leave_at_exit(self, error: BaseException | None) -> None:
        """Leave the run in a script that ends without doing so."""
        if self.running and (error is None or isinstance(error, KeyboardInterrupt)):
            self.log(
                "this script ends without fed.close(): what it trained last is sent now (Ctrl-C"
                " ends it without that)"
            )
        self.__exit__(None, error, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        """Leave the run. Raises RefusedError when the parameter server has refused this client."""
        is_fault = isinstance(error, Exception) and not isinstance(error, RunFinishedError)
        self._leave(f"the script raised {type(error).__name__}: {error}" if is_fault else None)
        if error is None or isinstance(error, RunFinishedError):
            with contextlib.suppress(StopError):  # it was asked for
                self._runtime.raise_failure()


_TEXT = (str, "text")
_PATH = (str | os.PathLike | None, "a path")
_KINDS: Mapping[str, tuple[Any, str]] = {
    "server": _TEXT,
    "name": (str | None, "text"),
    "run_dir": _PATH,
    "keys": _PATH,
    "log": (Callable, "a function that takes a line"),
    "allow": (str | Iterable | None, "a list of kinds of data"),
    "layers": _TEXT,
}


def _check_kinds(given: Mapping[str, object]) -> None:
    """Raise UsageError for an argument of `join` that is of another kind."""
    for name, (kinds, what) in _KINDS.items():
        if not isinstance(given[name], kinds):
            kind = type(given[name]).__name__
            raise UsageError(f"fsl_async.join: {name}= takes {what}, and got {kind}")
    if given["order"] not in {None, "first", "zeroth"}:
        raise UsageError(f"fsl_async.join: order={given['order']!r:.80}: first or zeroth")


@contextlib.contextmanager
def _ending_on_error(runtime: ClientRuntime) -> Iterator[None]:
    try:
        yield
    except RunFinishedError:
        runtime.training_ended(None)
        runtime.raise_failure()
        raise
    except BaseException as error:
        runtime.training_ended(str(error))
        raise


def join(
    server: str,
    *,
    name: str | None = None,
    device: str | None = None,
    run_dir: str | Path | None = None,
    log: Callable[[str], None] = print_line,
    keys: str | Path | None = None,
    insecure: bool = False,
    allow: str | Iterable[str] | None = None,
    rank: int = 0,
    order: Order | None = None,
    layers: str = "",
) -> Joined | JoinedRank:
    """Join a run from a script of your own; see `fsl_async.join`."""
    from fsl_async.cluster.name_slot import check_name, claim_name
    from fsl_async.keys.folder import site_policy

    errors_in_one_line()
    given = {"server": server, "name": name, "run_dir": run_dir, "keys": keys, "log": log}
    _check_kinds({**given, "allow": allow, "order": order, "layers": layers})
    rank = whole("fsl_async.join: rank", rank)
    place = Place.here()
    address = addresses.parse(server)
    folder = keys_for_dialling(address, None if keys is None else Path(keys), insecure=insecure)
    policy = site_policy(folder or KeysFolder(), allow, "allow=")
    held = contextlib.ExitStack()
    if name is None and place is None:
        name = held.enter_context(contextlib.closing(claim_name(address.tcp))).name
    try:
        options = ClientOptions(
            address.fsl,
            check_name(name) if name else "",  # of ranks, their node takes one
            device=None if device is None else str(device),  # a torch.device too
            run_dir=Path(run_dir) if run_dir is not None else None,
            keys=folder,
            policy=policy,
            rank=rank,
            order=order,
            layers=layers,
        )
        if place is not None:
            return join_ranks(options, place, context_of, log)
        stop = current_stopper()
        runtime = ClientRuntime(options, stop=stop, log=log)
        with _ending_on_error(runtime):
            member = runtime.wait_welcome()
            context = context_of(options, member, log)
            context = attrs.evolve(context, is_leaving=lambda: stop.requested)
            return Joined(runtime, context, held.close)
    except BaseException:
        held.close()
        raise
