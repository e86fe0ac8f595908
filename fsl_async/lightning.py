"""Puts a Lightning `Trainer` into a run, with one more argument and one more line.

    import fsl_async.lightning
    trainer = L.Trainer(callbacks=[fsl_async.lightning.Sync("fsl://ps.example.org:7100?key=...")])
    trainer.fit(module, loader)

The `Trainer` keeps its data, optimizers, gradient accumulation, precision, clipping, callbacks,
validation and checkpoints. Different in a run:

- The run decides how long training lasts, not `max_epochs` or `max_steps`. A callback that stops
  training, such as EarlyStopping, or `max_time`, ends this client's part.
- Learning rates follow the run's progress (`fed.rate_factor`), starting from those of the
  optimizers; schedulers of `configure_optimizers` are left out.
- The weights at the start are the run's: `fit(ckpt_path=...)` loads optimizers and callbacks.
- A script that is started again goes on after the last batch that its last acknowledged delta has
  trained. So a loader without a sampler of its own shuffles by the run's seed, and not by the
  script's. A data set without a length begins anew, unless it iterates `fed.shard`.
- In a run that tunes a base model (`tune.method = lora`) a module without adapters gets the run's,
  and the rest of it is frozen. One with adapters of its own keeps them.

Needs the extra `lightning`, and for adapters `hf`.
"""

import contextlib
from typing import Any

import fsl_async
from fsl_async.errors import TaskError
from fsl_async.learn.client import loops
from fsl_async.learn.client.fed import Fed
from fsl_async.learn.models.hf import extra

_Callback: Any = extra("lightning.pytorch", "lightning").Callback


class Sync(_Callback):  # type: ignore[misc]
    """Joins a run when `trainer.fit` begins, and leaves it when that ends.

    server: the parameter server's host:port or fsl:// address; by default that of the environment
        variable FSL_SERVER. With neither, nothing changes but one printed line.
    fed: instead of `server`, in a task of `fsl-node --role client --task FILE.py:FUNCTION`.
    options: those of `fsl_async.join`, such as name, keys, allow, rank, layers.

    `fit` raises FslError in one line: for a run or a `Trainer` that do not fit, and what
    `fsl_async.join`, `fed.lora` and `fed.attach` raise.
    """

    def __init__(
        self, server: str | None = None, *, fed: Fed | None = None, **options: Any
    ) -> None:
        self._server, self._options = server, options
        self.fed = fed
        """After the start of `fit`; None where it trains alone."""
        self._leaving = contextlib.ExitStack()
        self._tally = loops.Tally()
        self._is_used = False
        self._steps = 0  # of the Trainer, at the last report

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Join, and have the weights exchanged before there is an optimizer."""
        if stage != "fit":
            return
        if self._is_used:
            raise TaskError("fit was called twice: fsl_async.lightning.Sync joins one run, once")
        address = loops.address(self._server, self.fed, self._options)
        if self.fed is None and address is None:
            return
        loops.check_processes(trainer.world_size, trainer.num_devices)
        if address is not None:
            self.fed = self._leaving.enter_context(fsl_async.join(address, **self._options))
        self._is_used = True
        self._keep_positions(trainer)
        strategy, make = trainer.strategy, trainer.strategy.setup_optimizers
        strategy.load_model_state_dict = lambda *_, **__: None  # the weights are the run's

        def setup_optimizers(trainer: Any) -> None:
            """Called when the module is complete and on its device."""
            strategy.setup_optimizers = make
            assert self.fed is not None
            loops.hand_over(self.fed, pl_module)
            with loops.for_optimizer(self.fed):
                make(trainer)
            self._follow_the_run(trainer)

        strategy.setup_optimizers = setup_optimizers

    def _log(self, text: str) -> None:
        self._options.get("log", print)(text)

    def _keep_positions(self, trainer: Any) -> None:
        """Have training data, once they are set up, go on where this client was."""
        loop, strategy = trainer.fit_loop, trainer.strategy
        setup_data, process = loop.setup_data, strategy.process_dataloader

        def process_training(loader: Any) -> Any:
            loader = process(loader)
            assert self.fed is not None
            if not loops.keep_order(self.fed, loader):
                self._log(
                    "the training data have no length, or a sampler of their own: a relaunch begins"
                    " them anew, unless they come from fed.shard or fed.sampler"
                )
            return loader

        def setup() -> None:
            strategy.process_dataloader = process_training
            try:
                setup_data()
            finally:
                strategy.process_dataloader = process

        loop.setup_data = setup

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Leave out what the run decides about: rates, steps, and where the data go on."""
        if self.fed is not None:
            checkpoint.pop("loops", None)
            checkpoint["lr_schedulers"] = []
            self._log(
                f"{trainer.ckpt_path}: optimizers are taken from there, and the weights are those"
                " of the run"
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Take the run's learning rates, where optimizers of a checkpoint brought others."""
        if self.fed is None:
            return
        for config in trainer.strategy.lr_scheduler_configs:
            rates = config.scheduler.get_last_lr()
            for group, rate in zip(config.scheduler.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _follow_the_run(self, trainer: Any) -> None:
        """Let the run decide about rates and about the end."""
        assert self.fed is not None
        made = extra("lightning.pytorch.utilities.types", "lightning").LRSchedulerConfig
        configs = []
        if trainer.strategy.lr_scheduler_configs:
            self._log(
                "learning rates follow the run's progress: the script's schedulers are not used"
            )
        for optimizer in trainer.strategy.optimizers:
            self.fed.track(optimizer)
            configs.append(made(self.fed.scheduler(optimizer), interval="step"))
        trainer.strategy.lr_scheduler_configs = configs
        loop = trainer.fit_loop
        loop.min_epochs, loop.max_epochs = 0, -1
        loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = None, -1
        self._steps = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a batch; report the step if the optimizer has made one."""
        if self.fed is None:
            return
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        self._tally.add(loops.trained_in(batch), loss)
        if trainer.global_step == self._steps:
            return
        if not pl_module.automatic_optimization:
            for config in trainer.lr_scheduler_configs:
                config.scheduler.step()
        self._steps = trainer.global_step
        if not self._tally.report(self.fed):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the run, after the last delta."""
        self._leaving.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run; a script that fails sends no last delta."""
        self._leaving.__exit__(type(exception), exception, exception.__traceback__)
