"""Puts a Hugging Face `Trainer` into a run, with two more lines than training alone.

    import fsl_async.hf
    fsl_async.hf.patch(trainer, "fsl://ps.example.org:7100?key=...")
    trainer.train()

The `Trainer` (or a subclass, such as TRL's SFTTrainer) keeps its data, batches, optimizer, gradient
accumulation, mixed precision, clipping, callbacks, evaluation and checkpoints. Different in a run:

- The run decides how long training lasts, not `num_train_epochs` or `max_steps`. A callback that
  stops training, such as EarlyStoppingCallback, ends this client's part.
- Learning rates follow the run's progress (`fed.rate_factor`), starting from that of the script's
  arguments, so that warm-up and decay happen once in a run and not once in a round.
- The weights at the start are the run's. With `resume_from_checkpoint` the optimizer and random
  numbers are the checkpoint's. The weights at the end are of the run's last version:
  `load_best_model_at_end` is left out.
- A `Trainer` that is started again goes on after the last row that its last acknowledged delta has
  trained, in its own order of rows.
- In a run that tunes a base model (`tune.method = lora`) a model without adapters gets the run's,
  and the rest of it is frozen. One with adapters (a `PeftModel`) keeps its own. Checkpoints are
  PEFT folders, which `PeftModel.from_pretrained(base, folder, is_trainable=True)` and a `Trainer`
  around it go on from outside of a run; see `fsl_async.learn.models.saving`.
- Under `torchrun --nproc-per-node N` or `accelerate launch` all ranks are one client. Each counts
  its own tokens, rank 0 prints and saves. A callback that stops training in one rank stops it in
  all. Ranks have copies (DDP), or shards with `fsdp_config={"version": 2}`: then the weights are
  the run's when `train` begins, adapters are refused, and a checkpoint's optimizer is not loaded.

Needs the extra `hf`.

A `Trainer` can resume from a folder with its state, and skips in its data what the steps of that
state have trained. So that of a relaunched client is given such a folder, with the steps of the
last acknowledged delta. Weights are the run's in any case; optimizer, random numbers and the scaler
of mixed precision come from the checkpoint that the script asks for, if it does.

Data without a length are one endless epoch, in which they begin again when they end: the `Trainer`
would begin them again after `max_steps`, and has no position in them.
"""

import contextlib
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

import fsl_async
from fsl_async.errors import TaskError
from fsl_async.learn.client import loops
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.items import Items, identity
from fsl_async.learn.data.packing import Position, check_of
from fsl_async.learn.models.hf import extra

ENDLESS = sys.maxsize
"""Epochs and steps of a `Trainer` whose run ends them."""
_SHARES = ("logging_steps", "eval_steps", "save_steps")
"""Arguments that may be a share of all steps, below 1."""
_MARK = "fsl_async_run"
"""Attribute of a `Trainer` in a run."""


def patch(
    trainer: Any, server: str | None = None, *, fed: Fed | None = None, **options: Any
) -> Fed | None:
    """Join a run with the model of `trainer`, which `trainer.train()` then trains until the end.

    server: the parameter server's host:port or fsl:// address; by default that of the environment
        variable FSL_SERVER. With neither, nothing changes but one printed line.
    fed: instead of `server`, in a task of `fsl-node --role client --task FILE.py:FUNCTION`.
    options: those of `fsl_async.join`, such as name, keys, allow, rank, layers.
    Returns fed; None where it trains alone.

    On return the model has the run's weights, unless it is to be sharded. The last delta is sent
    when `train` returns, unless it raised. Raises FslError in one line: for a run or a `Trainer`
    that do not fit, and what `fsl_async.join`, `fed.lora` and `fed.attach` raise.
    """
    address = loops.address(server, fed, options)
    if fed is None and address is None:
        return None
    from fsl_async.learn.gang.link import Place

    place = Place.here() if fed is None else None
    _check(trainer, fed.ranks if fed is not None else 1 if place is None else place.world)
    with contextlib.ExitStack() as leaving:
        if address is not None:
            fed = leaving.enter_context(fsl_async.join(address, **options))
        assert fed is not None
        if not trainer.is_fsdp_enabled:
            loops.hand_over(fed, trainer.model)
        elif fed.config.get("tune", {}).get("method", "none") != "none":
            raise TaskError(
                "this run tunes a base model (tune.method), and its adapters cannot be sharded:"
                " leave out fsdp"
            )
        if fed.adapters is not None and trainer.optimizer is not None:
            raise TaskError(
                "Trainer(optimizers=...) has an optimizer from before the run's adapters: leave it"
                " out, or give optimizer_cls_and_kwargs"
            )
        log = options.get("log", print)
        _InRun(trainer, fed, leaving.pop_all(), log if fed.rank == 0 else lambda _: None)
    return fed


def _check(trainer: Any, ranks: int) -> None:
    """Raise TaskError for a `Trainer` that a client of so many ranks cannot be."""
    if hasattr(trainer, _MARK):
        raise TaskError("fsl_async.hf.patch was called twice: a Trainer joins one run, once")
    loops.check_processes(trainer.args.world_size, trainer.args.n_gpu, ranks=ranks)
    if trainer.is_deepspeed_enabled:
        raise TaskError("DeepSpeed divides the weights in ways of its own: use FSDP, version 2")
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    if plugin is not None and getattr(plugin, "fsdp_version", 1) != 2:
        raise TaskError(
            "FSDP of version 1 hides the weights in vectors of its own: give fsdp_config={'version'"
            ": 2} (accelerate 1.6 or newer)"
        )
    if ranks > 1 and isinstance(trainer.train_dataset, Items):
        raise TaskError(
            "the Trainer divides its data among the ranks, and fed.shard has done so already: give"
            " it the data without fed.shard"
        )


STATE, OPTIMIZER = "trainer_state.json", "optimizer.pt"
"""Files of a checkpoint."""
REPEATABLE = {"SeedableRandomSampler", "SequentialSampler"}
"""Samplers whose order is a function of the script's seed and the epoch."""


class _InRun:
    """Methods of one `Trainer` object that follow the run, and its position in its data.

    They are replaced in the object, not in a subclass: it exists already, and may be of any
    subclass.
    """

    def __init__(
        self,
        trainer: Any,
        fed: Fed,
        leaving: contextlib.ExitStack,
        log: Callable[[str], None],
    ) -> None:
        self.trainer, self.fed, self._log, self._leaving = trainer, fed, log, leaving
        self.tally = loops.Tally()
        args = trainer.args
        order = [
            getattr(args, name, None)
            for name in ("seed", "data_seed", "train_sampling_strategy", "group_by_length")
        ]
        batch = (args.train_batch_size * args.world_size, args.gradient_accumulation_steps)
        check = check_of("trainer", *identity(trainer.train_dataset), *batch, *order)
        # epoch, at: of data without a length, in batches. drawn: optimizer steps in all.
        self._position = Position(check=check)
        self._has_own = not isinstance(trainer.train_dataset, Items)
        """Whether the position is this one's, and not that of `fed.shard`."""
        self._is_stream = False
        """Whether the data have no length, once the `Trainer` has made its loader."""
        self._steps_per_epoch = 1  # the script's, of data without a length
        self._asked = ""  # the checkpoint that the script resumes from
        self._folder: Path | None = None
        self._stream: Iterator[Any] | None = None
        replaced: dict[str, Callable[..., Any]] = {
            "train": self._train,
            "set_initial_training_values": self._plan,
            "create_optimizer": self._create_optimizer,
            "create_scheduler": self._create_scheduler,
            "training_step": self._training_step,
            "get_batch_samples": self._batches,
            "_load_from_checkpoint": lambda *_, **__: None,  # weights are the run's
            "_load_optimizer_and_scheduler": self._load_optimizer,
        }
        self._own = {name: getattr(trainer, name) for name in replaced}
        """The `Trainer`'s own methods."""
        for name in ("_load_rng_state", "_load_scaler"):
            if load := getattr(trainer, name, None):  # some versions have no scaler of their own
                replaced[name] = lambda _, load=load: load(self._asked or None)
        for name, method in replaced.items():
            setattr(trainer, name, method)
        log(
            f"learning rates follow the run's progress, from learning_rate={args.learning_rate:g}"
            f" on: lr_scheduler_type={args.lr_scheduler_type.value} and its warm-up are not used"
        )
        if args.load_best_model_at_end:
            log("load_best_model_at_end is left out: the weights at the end are the run's")
        args.load_best_model_at_end = False
        trainer.model_init = None  # train would make another model with it
        trainer.add_callback(_callback(self))
        if fed.ranks > 1:
            self._own["on_step_end"] = trainer.callback_handler.on_step_end
            trainer.callback_handler.on_step_end = self._on_step_end
            if args.fsdp and not trainer.is_fsdp_enabled:
                log(
                    "fsdp has no effect: this accelerate shards on GPUs only, and copies here (DDP)"
                )
        setattr(trainer, _MARK, self)

    # --- methods of the `Trainer` ---

    def _train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        """Train until the run ends, and leave it."""
        if not self.fed.running:
            raise TaskError("trainer.train: this client's run has ended; make a new Trainer")
        with self._leaving, self._resumed(resume_from_checkpoint) as folder:
            return self._own["train"](folder, *arguments, **named)

    def _plan(self, args: Any, loader: Any, *more: Any) -> tuple[Any, ...]:
        """Numbers of epochs and steps, of which only those of one epoch are the script's."""
        values = list(self._own["set_initial_training_values"](args, loader, *more))
        steps = values[-1]
        for name in _SHARES:
            share = getattr(args, name)
            if share is not None and 0 < share < 1:
                setattr(args, name, max(1, math.ceil(share * steps)))
        if self._folder is not None:
            self._write_state()  # again: shares of steps are numbers now
        # Epochs; samples of all of them, from which the Trainer computes its speed; steps.
        values[0], values[3], values[-1] = ENDLESS, values[3] * (ENDLESS / steps), ENDLESS
        self._is_stream = not extra("transformers.trainer_utils", "transformers").has_length(loader)
        if self._is_stream:  # one epoch: its steps and its batches
            values[1] = values[5] = ENDLESS
            self._steps_per_epoch = steps
            args.ignore_data_skip = True  # `_batches` does
            self._log(
                f"max_steps={steps} does not end training, the run does: data without a length are"
                " read to their end, and then from their beginning"
            )
            return tuple(values)
        sampler = type(getattr(loader.batch_sampler, "sampler", loader.sampler)).__name__
        if self._has_own and sampler not in REPEATABLE:
            self._log(
                f"{sampler} draws another order in each process: a relaunch in the middle of an"
                " epoch may train some of its rows twice, and leave out others"
            )
        return tuple(values)

    def _create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        """Make that of the script, with all weights that train in some version."""
        with loops.for_optimizer(self.fed):
            return self._own["create_optimizer"](*arguments, **named)

    def _create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make a schedule by the run's progress."""
        trainer = self.trainer
        self.fed.track(optimizer or trainer.optimizer)
        trainer.lr_scheduler = self.fed.scheduler(optimizer or trainer.optimizer)
        return trainer.lr_scheduler

    def _on_step_end(self, *arguments: Any) -> Any:
        """Stop training in all ranks where a callback stops it in one, at the same step."""
        control = self._own["on_step_end"](*arguments)
        stops = torch.tensor(int(control.should_training_stop), device=self.trainer.args.device)
        torch.distributed.all_reduce(stops)
        control.should_training_stop = bool(stops)
        return control

    def _training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Train a batch, and count it."""
        shifts = getattr(self.trainer, "_loss_shifts_labels", False)
        trained = loops.trained_in(inputs, shifts=shifts)
        loss = self._own["training_step"](model, inputs, *arguments, **named)
        self.tally.add(trained, loss)
        return loss

    def _batches(self, epoch_iterator: Any, *arguments: Any, **named: Any) -> Any:
        """Return the batches of one optimizer step, and their number of items."""
        if self._is_stream:
            self._stream = epoch_iterator = self._stream or self._endless()
        return self._own["get_batch_samples"](epoch_iterator, *arguments, **named)

    def _load_optimizer(self, checkpoint: str | None) -> None:
        """Load that of the script's checkpoint; learning rates stay the run's."""
        path = Path(self._asked, OPTIMIZER)
        if not checkpoint or not self._asked:
            return
        if not path.is_file():
            self._log(f"{path} is not there: the optimizer begins anew")
            return
        optimizer = self.trainer.optimizer
        rates = [group["lr"] for group in optimizer.param_groups]
        try:
            optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        except (ValueError, KeyError, RuntimeError) as error:
            raise TaskError(
                f"{path} is of another model or optimizer ({error}): leave out"
                " resume_from_checkpoint"
            ) from error
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    # --- where training goes on ---

    @contextmanager
    def _resumed(self, asked: Any) -> Iterator[str | None]:
        """The checkpoint to resume from, in a `with` block around training; None: begin.

        asked: the script's `resume_from_checkpoint`. Raises TaskError where it names no checkpoint.
        """
        self._asked = self._checkpoint(asked) if asked else ""
        if self.fed.ranks > 1:  # with other moments their weights would part
            found: list[Any] = [None] * self.fed.ranks
            mine = Path(self._asked).name, Path(self._asked, OPTIMIZER).is_file()
            torch.distributed.all_gather_object(found, mine)
            if any(one != found[0] for one in found):
                raise TaskError(
                    "resume_from_checkpoint: the ranks find different checkpoints: keep output_dir"
                    " where all of them read it"
                )
        if self._has_own:
            self._position = self.fed.position_in(self._position.check)
            self.fed.keep_position(lambda: self._position.to_facts())  # noqa: PLW0108 - of then
        if self._asked:
            self._log(
                f"{self._asked}: the optimizer is taken from there, and the weights are version"
                f" {self.fed.version} of the run"
            )
            if not self._position.drawn and self._has_own:
                steps = self._state().global_step
                batches = steps * self.trainer.args.gradient_accumulation_steps
                self._position = attrs.evolve(self._position, drawn=steps, at=batches)
        if not (self._asked or self._position.drawn):
            yield None
            return
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            self._write_state()
            yield folder

    def _checkpoint(self, asked: Any) -> str:
        if asked is True:
            output = self.trainer.args.output_dir
            utils = extra("transformers.trainer_utils", "transformers")
            found = utils.get_last_checkpoint(output) if Path(output).is_dir() else None
            if found is None:
                self._log(f"{output} has no checkpoint to resume from: the optimizer begins anew")
            return str(found or "")
        if not (Path(asked) / STATE).is_file():
            raise TaskError(f"resume_from_checkpoint={str(asked)!r} has no {STATE}")
        return str(Path(asked))

    def _state(self) -> Any:
        made = extra("transformers").TrainerState
        if self._asked:
            return made.load_from_json(str(Path(self._asked) / STATE))
        keeps = extra("transformers.trainer_callback", "transformers").ExportableState
        handler = self.trainer.callback_handler
        stateful = [
            one for one in (*handler.callbacks, self.trainer.control) if isinstance(one, keeps)
        ]
        return made(stateful_callbacks=stateful)

    def _write_state(self) -> None:
        args, state = self.trainer.args, self._state()
        state.global_step = self._position.drawn
        state.train_batch_size = args.train_batch_size
        state.compute_steps(args, state.max_steps)
        assert self._folder is not None
        state.save_to_json(str(self._folder / STATE))

    def _endless(self) -> Iterator[Any]:
        skip_first_batches = extra("accelerate", "transformers").skip_first_batches
        loader = self.trainer.callback_handler.train_dataloader
        start = self._position if self._has_own else Position()
        epoch, at = start.epoch, start.at
        while True:
            batches = skip_first_batches(loader, at) if at else loader
            batches.set_epoch(epoch)
            for batch in batches:
                at += 1
                self._position = attrs.evolve(self._position, epoch=epoch, at=at)
                yield batch
            if not at:
                raise TaskError("the Trainer's train_dataset has no rows: give more data")
            epoch, at = epoch + 1, 0

    def step_ended(self, state: Any) -> bool:
        """Report an optimizer step. False once the run has ended."""
        self._position = attrs.evolve(self._position, drawn=state.global_step)
        if self._is_stream:
            state.epoch = state.global_step / self._steps_per_epoch
        return self.tally.report(self.fed)


def _callback(run: _InRun) -> Any:
    """The callback that reports steps and ends training."""
    base: Any = extra("transformers").TrainerCallback

    class Sync(base):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            run.tally = loops.Tally()
            if run.trainer.is_fsdp_enabled:  # sharded just now
                run.fed.attach(run.trainer.model)
            for callback in run.trainer.callback_handler.callbacks:
                if getattr(callback, "training_bar", None) is not None:
                    callback.training_bar.total = None

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not run.step_ended(state):
                control.should_training_stop = True
                # What the Trainer does after the last step of its own count.
                control.should_save |= args.save_strategy == "steps"
                control.should_evaluate |= args.eval_strategy == "steps"

    return Sync()
