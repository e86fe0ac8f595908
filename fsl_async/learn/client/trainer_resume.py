"""Where the `Trainer` of a relaunched client goes on: in its data, and with which optimizer.

The `Trainer` can resume from a folder with its state, and skips in its data what the steps of that
state have trained. So it is given such a folder, with the steps of the client's last acknowledged
delta. Weights are the run's in any case; optimizer, random numbers and the scaler of mixed
precision come from the checkpoint that the script asks for, if it does.

Data without a length are one endless epoch, in which they begin again when they end: the `Trainer`
would begin them again after `max_steps`, and has no position in them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from fsl_async.errors import TaskError
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.client.items import Items, identity
from fsl_async.learn.data.packing import Position, check_of
from fsl_async.learn.models.hf import extra

STATE, OPTIMIZER = "trainer_state.json", "optimizer.pt"
"""Files of a checkpoint."""
REPEATABLE = {"SeedableRandomSampler", "SequentialSampler"}
"""Samplers whose order is a function of the script's seed and the epoch."""


class Resume:
    """Methods of a `Trainer`, and what it has trained of its data."""

    def __init__(self, trainer: Any, fed: Fed, log: Callable[[str], None]) -> None:
        self.trainer, self.fed, self.log = trainer, fed, log
        self.is_stream = False
        """Whether the data have no length, once the `Trainer` has made its loader."""
        self._steps_per_epoch = 1  # the script's, of data without a length
        self._asked = ""  # the checkpoint that the script resumes from
        self._folder: Path | None = None
        self._stream: Iterator[Any] | None = None
        args = trainer.args
        order = [
            getattr(args, name, None)
            for name in ("seed", "data_seed", "train_sampling_strategy", "group_by_length")
        ]
        batch = (args.train_batch_size * args.world_size, args.gradient_accumulation_steps)
        check = check_of("trainer", *identity(trainer.train_dataset), *batch, *order)
        self._has_own = not isinstance(trainer.train_dataset, Items)
        """Whether the position is this one's, and not that of `fed.shard`."""
        # epoch, at: of data without a length, in batches. drawn: optimizer steps in all.
        self._position = Position(check=check)
        self._get_batch_samples = trainer.get_batch_samples
        for name in ("_load_rng_state", "_load_scaler"):
            if load := getattr(trainer, name, None):  # some versions have no scaler of their own
                setattr(trainer, name, lambda _, load=load: load(self._asked or None))
        # Weights are the run's.
        trainer._load_from_checkpoint = lambda *_, **__: None  # noqa: SLF001
        trainer._load_optimizer_and_scheduler = self._load_optimizer  # noqa: SLF001
        trainer.get_batch_samples = self._batches

    @contextmanager
    def folder(self, asked: Any) -> Iterator[str | None]:
        """The checkpoint to resume from, in a `with` block around training; None: begin.

        asked: by the script, as `resume_from_checkpoint`. Raises TaskError where that is none.
        """
        self._asked = self._checkpoint(asked) if asked else ""
        if self.fed.ranks > 1:
            self._check_ranks()
        if self._has_own:
            self._position = self.fed.position_in(self._position.check)
            self.fed.keep_position(self._facts)
        if self._asked:
            state = self._state(self._asked)
            self.log(
                f"{self._asked}: the optimizer is taken from there, and the weights are version"
                f" {self.fed.version} of the run"
            )
            if not self._position.drawn and self._has_own:
                batches = state.global_step * self.trainer.args.gradient_accumulation_steps
                self._position = attrs.evolve(self._position, drawn=state.global_step, at=batches)
        if not (self._asked or self._position.drawn):
            yield None
            return
        with tempfile.TemporaryDirectory() as folder:
            self._folder = Path(folder)
            self._write_state()
            yield folder

    def _check_ranks(self) -> None:
        """Raise TaskError unless all ranks resume from the same: else their weights part."""
        found: list[Any] = [None] * self.fed.ranks
        mine = Path(self._asked).name, Path(self._asked, OPTIMIZER).is_file()
        torch.distributed.all_gather_object(found, mine)
        if any(one != found[0] for one in found):
            raise TaskError(
                "resume_from_checkpoint: the ranks find different checkpoints: keep output_dir"
                " where all of them read it"
            )

    def _checkpoint(self, asked: Any) -> str:
        if asked is True:
            output = self.trainer.args.output_dir
            utils = extra("transformers.trainer_utils", "transformers")
            found = utils.get_last_checkpoint(output) if Path(output).is_dir() else None
            if found is None:
                self.log(f"{output} has no checkpoint to resume from: the optimizer begins anew")
            return str(found or "")
        if not (Path(asked) / STATE).is_file():
            raise TaskError(f"resume_from_checkpoint={str(asked)!r} has no {STATE}")
        return str(Path(asked))

    def _state(self, folder: str) -> Any:
        made = extra("transformers").TrainerState
        if folder:
            return made.load_from_json(str(Path(folder) / STATE))
        keeps = extra("transformers.trainer_callback", "transformers").ExportableState
        handler = self.trainer.callback_handler
        stateful = [
            one for one in (*handler.callbacks, self.trainer.control) if isinstance(one, keeps)
        ]
        return made(stateful_callbacks=stateful)

    def _write_state(self) -> None:
        trainer, state = self.trainer, self._state(self._asked)
        state.global_step = self._position.drawn
        state.train_batch_size = trainer.args.train_batch_size
        state.compute_steps(trainer.args, state.max_steps)
        assert self._folder is not None
        state.save_to_json(str(self._folder / STATE))

    def planned(self, loader: Any, script_steps: int) -> None:
        """The `Trainer` has made its loader, and shares of steps are numbers."""
        self.is_stream = not extra("transformers.trainer_utils", "transformers").has_length(loader)
        if self._folder is not None:
            self._write_state()
        if self.is_stream:
            self._steps_per_epoch = script_steps
            self.trainer.args.ignore_data_skip = True  # `_batches` does
            self.log(
                f"max_steps={script_steps} does not end training, the run does: data without a"
                " length are read to their end, and then from their beginning"
            )
            return
        sampler = type(getattr(loader.batch_sampler, "sampler", loader.sampler)).__name__
        if self._has_own and sampler not in REPEATABLE:
            self.log(
                f"{sampler} draws another order in each process: a relaunch in the middle of an"
                " epoch may train some of its rows twice, and leave out others"
            )

    def step_ended(self, state: Any) -> None:
        """An optimizer step is done, and `fed.step` comes next."""
        self._position = attrs.evolve(self._position, drawn=state.global_step)
        if self.is_stream:
            state.epoch = state.global_step / self._steps_per_epoch

    def _facts(self) -> dict[str, float]:
        return self._position.to_facts()

    def _batches(self, epoch_iterator: Any, *arguments: Any, **named: Any) -> Any:
        """Those of an optimizer step."""
        if self.is_stream:
            self._stream = epoch_iterator = self._stream or self._endless()
        return self._get_batch_samples(epoch_iterator, *arguments, **named)

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

    def _load_optimizer(self, checkpoint: str | None) -> None:
        """Load that of the script's checkpoint; learning rates stay the run's."""
        path = Path(self._asked, OPTIMIZER)
        if not checkpoint or not self._asked:
            return
        if not path.is_file():
            self.log(f"{path} is not there: the optimizer begins anew")
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
