"""A Lightning Trainer that follows a run; LocalFed stands for the run."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from fsl_async.errors import TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed

lightning = pytest.importorskip("lightning.pytorch", reason="the extra lightning is not installed")

import fsl_async.lightning  # noqa: E402 - it imports lightning

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
]


class Module(lightning.LightningModule):
    """A linear layer that learns zero, at a rate that a schedule of its own would end at once."""

    def __init__(self, automatic=True):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        self.automatic_optimization = automatic
        self.rates = []

    def training_step(self, batch, _):  # noqa: D102
        loss = self.block(batch).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def on_before_optimizer_step(self, optimizer):  # noqa: D102
        self.rates.append(optimizer.param_groups[0]["lr"])

    def configure_optimizers(self):  # noqa: D102
        weights = [weight for weight in self.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=0.5)
        ending = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
        return [optimizer], [{"scheduler": ending, "interval": "step"}]


def fit(sync, tmp_path, module=None, loader=None, **more):
    """Fit a module for one epoch of 4 batches, unless the run decides otherwise."""
    torch.manual_seed(0)
    arguments = {"max_epochs": 1, "accelerator": "cpu", **more}
    ckpt_path = arguments.pop("ckpt_path", None)
    trainer = lightning.Trainer(
        callbacks=[sync],
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    module = module or Module()
    loader = DataLoader(torch.ones(12, 2), batch_size=3) if loader is None else loader
    trainer.fit(module, loader, ckpt_path=ckpt_path)
    return trainer, module


def alone(*, steps=6, **settings):
    """Make a run of one client."""
    train = {"schedule": "constant", "warmup_steps": 3, "rewarm_steps": 3}
    context = ClientContext("alice", config={"train": train, **settings})
    return LocalFed(context, steps=steps)


def test_without_a_server_nothing_changes(tmp_path, monkeypatch, capsys):
    """The same script must go on working outside of any run."""
    monkeypatch.delenv("FSL_SERVER", raising=False)
    trainer, module = fit(fsl_async.lightning.Sync(), tmp_path)
    assert trainer.global_step == 4
    assert module.rates == [0.5, 0.0, 0.0, 0.0]
    assert "trains alone" in capsys.readouterr().out


@pytest.mark.parametrize("automatic", [True, False])
def test_the_run_decides_about_the_end_and_the_rates(tmp_path, automatic):
    """Steps are those of the optimizer, and the module's own schedule is left out."""
    fed = alone()
    trainer, module = fit(fsl_async.lightning.Sync(fed=fed), tmp_path, Module(automatic))
    assert trainer.global_step == 6
    assert module.rates == [0.125, 0.125, 0.25, 0.375, 0.5, 0.5]
    assert fed.status()["tokens"] == 6 * 3
    assert fed.model is module


def test_a_step_has_the_batches_that_were_accumulated(tmp_path):
    """Its loss is their mean, its weight their rows."""
    fed = alone(steps=3)
    sync = fsl_async.lightning.Sync(fed=fed)
    module = Module()
    loss = module.block(torch.ones(1, 2)).square().item()
    trainer, _ = fit(sync, tmp_path, module, accumulate_grad_batches=2, max_steps=1)
    assert trainer.global_step == 3
    assert fed.status()["tokens"] == 3 * 6
    assert fed.history[0] == (1, {"loss": pytest.approx(loss)})


def test_only_adapters_train(tmp_path):
    """In a run that tunes a base model."""
    fed = alone(tune={"method": "lora", "rank": 1})
    _, module = fit(fsl_async.lightning.Sync(fed=fed), tmp_path)
    names = [name for name, weight in module.named_parameters() if weight.requires_grad]
    assert len(names) == 4
    assert all(".lora_" in name for name in names)
    losses = [metrics["loss"] for _, metrics in fed.history]
    assert losses[-1] < losses[0]


def test_a_checkpoint_gives_its_optimizer_and_not_its_weights(tmp_path, capsys):
    """Its weights would go into a delta as if they had been trained, and its rates be too low."""
    trainer, first = fit(fsl_async.lightning.Sync(fed=alone()), tmp_path)
    assert "the script's schedulers are not used" in capsys.readouterr().out
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    held = trainer.optimizers[0].state_dict()["state"]

    class Looks(Module):
        def on_train_batch_start(self, *_):
            if not self.rates:
                state = self.optimizers().optimizer.state_dict()["state"]
                self.loaded = all(
                    torch.equal(held[n]["exp_avg"], state[n]["exp_avg"]) for n in held
                )
                self.begun = [weight.clone() for weight in self.parameters()]

    module = Looks()
    before = [weight.clone() for weight in module.parameters()]
    sync = fsl_async.lightning.Sync(fed=alone())
    trainer, _ = fit(sync, tmp_path, module, ckpt_path=tmp_path / "one.ckpt")
    assert trainer.global_step == 6  # steps, and rows, are counted by the run
    assert module.loaded
    assert all(map(torch.equal, module.begun, before))
    assert not any(map(torch.equal, first.parameters(), before))
    assert module.rates == [0.125, 0.125, 0.25, 0.375, 0.5, 0.5]
    assert "the weights are those of the run" in capsys.readouterr().out


class Launched(LocalFed):
    """A client that was killed after its last delta and started again."""

    def __init__(self, steps, position):
        super().__init__(ClientContext("alice", position=position), steps=steps)

    def step(self, **done):
        """The delta is made within a step."""
        self.delta = self._own_training.facts["position"]()
        return super().step(**done)


class Numbered(Module):
    """Keeps the rows that it trains."""

    def training_step(self, batch, number):  # noqa: D102
        self.seen = [*getattr(self, "seen", []), batch[:, 0].int().tolist()]
        return super().training_step(batch / 100, number)


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_relaunched_script_goes_on_after_its_last_delta(tmp_path, workers):
    """It began at its first row each time, or drew another order."""

    def rows_of(steps, position):
        fed, module = Launched(steps, position), Numbered()
        rows = torch.arange(13.0)[:, None].repeat(1, 2)
        loader = DataLoader(rows, batch_size=2, shuffle=True, num_workers=workers)
        torch.manual_seed(steps)
        fit(fsl_async.lightning.Sync(fed=fed), tmp_path, module, loader=loader)
        return module.seen, fed.delta

    whole, _ = rows_of(20, {})
    first = [row for batch in whole[:7] for row in batch]
    assert sorted(first) == list(range(13))
    assert first != sorted(first)
    seen, position = [], {}
    for steps in (2, 3, 6):
        more, position = rows_of(steps, position)
        seen += more
    assert seen == whole[:11]


def test_data_without_a_position_are_a_line(tmp_path, capsys):
    """Their user would believe that a relaunch goes on."""

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(12, 2))

    loader = DataLoader(Endless(), batch_size=3)
    fit(fsl_async.lightning.Sync(fed=alone()), tmp_path, loader=loader)
    assert capsys.readouterr().out.count("a relaunch begins them anew") == 1


def test_what_cannot_join(tmp_path):
    """One line, and no training."""
    sync = fsl_async.lightning.Sync(fed=alone())
    fit(sync, tmp_path)
    with pytest.raises(TaskError, match="twice"):
        fit(sync, tmp_path)
