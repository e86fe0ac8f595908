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
  trained, in its own order of rows; see `fsl_async.learn.client.trainer_resume`.
- In a run that tunes a base model (`tune.method = lora`) a model without adapters gets the run's,
  and the rest of it is frozen. One with adapters (a `PeftModel`) keeps its own. Checkpoints are
  PEFT folders, which `PeftModel.from_pretrained(base, folder, is_trainable=True)` and a `Trainer`
  around it go on from outside of a run; see `fsl_async.learn.models.saving`.
- Under `torchrun --nproc-per-node N` or `accelerate launch` all ranks are one client. Each counts
  its own tokens, rank 0 prints and saves. A callback that stops training in one rank stops it in
  all. Ranks have copies (DDP), or shards with `fsdp_config={"version": 2}`: then the weights are
  the run's when `train` begins, adapters are refused, and a checkpoint's optimizer is not loaded.

Needs the extra `hf`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

import fsl_async
from fsl_async.errors import TaskError
from fsl_async.learn.client import loops
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.items import Items
from fsl_async.learn.client.trainer_resume import Resume
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
    _check(trainer, _ranks() if fed is None else fed.ranks)
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


def _ranks() -> int:
    """Number of processes of the client that `fsl_async.join` makes of this one."""
    from fsl_async.nodes.client.gang_joining import Place

    place = Place.here()
    return 1 if place is None else place.world


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


class _InRun:
    """Methods of one `Trainer` object, replaced by ones that follow the run.

    Replaced in the object, not in a subclass: it exists already, and may be of any subclass.
    """

    def __init__(
        self,
        trainer: Any,
        fed: Fed,
        leaving: contextlib.ExitStack,
        log: Callable[[str], None],
    ) -> None:
        self.trainer, self.fed = trainer, fed
        self.tally = loops.Tally()
        self.resume = Resume(trainer, fed, log)
        self._leaving = leaving
        self._train = trainer.train
        self._plan = trainer.set_initial_training_values
        self._create_optimizer = trainer.create_optimizer
        self._training_step = trainer.training_step
        trainer.train = self.train
        trainer.set_initial_training_values = self.plan
        trainer.create_optimizer = self.create_optimizer
        trainer.create_scheduler = self.create_scheduler
        trainer.training_step = self.training_step
        args = trainer.args
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
            self._on_step_end = trainer.callback_handler.on_step_end
            trainer.callback_handler.on_step_end = self.on_step_end
            if args.fsdp and not trainer.is_fsdp_enabled:
                log(
                    "fsdp has no effect: this accelerate shards on GPUs only, and copies here (DDP)"
                )
        setattr(trainer, _MARK, self)

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **named: Any) -> Any:
        """Train until the run ends, and leave it."""
        if not self.fed.running:
            raise TaskError("trainer.train: this client's run has ended; make a new Trainer")
        with self._leaving, self.resume.folder(resume_from_checkpoint) as folder:
            return self._train(folder, *arguments, **named)

    def plan(self, args: Any, loader: Any, *more: Any) -> tuple[Any, ...]:
        """Numbers of epochs and steps, of which only those of one epoch are the script's."""
        values = list(self._plan(args, loader, *more))
        steps = values[-1]
        for name in _SHARES:
            share = getattr(args, name)
            if share is not None and 0 < share < 1:
                setattr(args, name, max(1, math.ceil(share * steps)))
        self.resume.planned(loader, steps)
        # Epochs; samples of all of them, from which the Trainer computes its speed; steps.
        values[0], values[3], values[-1] = ENDLESS, values[3] * (ENDLESS / steps), ENDLESS
        if self.resume.is_stream:  # one epoch: its steps and its batches
            values[1] = values[5] = ENDLESS
        return tuple(values)

    def create_optimizer(self, *arguments: Any, **named: Any) -> Any:
        """Make that of the script, with all weights that train in some version."""
        with loops.for_optimizer(self.fed):
            return self._create_optimizer(*arguments, **named)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make a schedule by the run's progress."""
        trainer = self.trainer
        self.fed.track(optimizer or trainer.optimizer)
        trainer.lr_scheduler = self.fed.scheduler(optimizer or trainer.optimizer)
        return trainer.lr_scheduler

    def on_step_end(self, *arguments: Any) -> Any:
        """Stop training in all ranks where a callback stops it in one, at the same step."""
        control = self._on_step_end(*arguments)
        stops = torch.tensor(int(control.should_training_stop), device=self.trainer.args.device)
        torch.distributed.all_reduce(stops)
        control.should_training_stop = bool(stops)
        return control

    def training_step(self, model: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        """Train a batch, and count it."""
        shifts = getattr(self.trainer, "_loss_shifts_labels", False)
        trained = loops.trained_in(inputs, shifts=shifts)
        loss = self._training_step(model, inputs, *arguments, **named)
        self.tally.add(trained, loss)
        return loss


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
            run.resume.step_ended(state)
            if not run.tally.report(run.fed):
                control.should_training_stop = True
                # What the Trainer does after the last step of its own count.
                control.should_save |= args.save_strategy == "steps"
                control.should_evaluate |= args.eval_strategy == "steps"

    return Sync()
