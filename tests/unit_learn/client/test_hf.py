"""A Hugging Face Trainer that follows a run; LocalFed stands for the run."""

import types

import peft
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import fsl_async.hf
from fsl_async.errors import TaskError
from fsl_async.learn.client.context import ClientContext
from fsl_async.learn.client.local_fed import LocalFed

LORA = {"tune": {"method": "lora", "rank": 2}}
ROW = torch.tensor([1, 2, 3, 4, 5, 6])
LABELS = torch.tensor([-100, -100, 3, 4, 5, 6])


def config(**more):
    return LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=8,
        pad_token_id=0,
        **more,
    )


@pytest.fixture
def made(tmp_path):
    """Make a Trainer of 3 steps on rows that are all the same."""

    def make(model=None, **more):
        named = {name: more.pop(name) for name in ("callbacks", "optimizers") if name in more}
        arguments = {
            "max_steps": 3,
            "per_device_train_batch_size": 2,
            "use_cpu": True,
            "dataloader_pin_memory": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            **more,
        }
        torch.manual_seed(0)
        rows = [{"input_ids": ROW, "labels": LABELS}] * 8
        return Trainer(
            model or LlamaForCausalLM(config()),
            TrainingArguments(str(tmp_path), **arguments),
            train_dataset=rows,
            eval_dataset=rows[:2],
            **named,
        )

    return make


class Joined(LocalFed):
    """What `fsl_async.join` returns."""

    def __init__(self, **settings):
        super().__init__(ClientContext("alice", config=settings), steps=5)
        self.left = []

    def __enter__(self):
        return self

    def __exit__(self, _, error, __):
        self.left.append(error)


def alone(*, steps=5, **settings):
    """Make a run of one client."""
    return LocalFed(ClientContext("alice", config=settings), steps=steps)


def test_without_a_server_nothing_changes(made, monkeypatch, capsys):
    """The same script must go on working outside of any run."""
    monkeypatch.delenv("FSL_SERVER", raising=False)
    trainer = made()
    before = dict(vars(trainer))
    assert fsl_async.hf.patch(trainer) is None
    assert vars(trainer) == before
    assert capsys.readouterr().out.startswith("trains alone")
    assert trainer.train().global_step == 3


def test_the_run_ends_training_and_steps_are_counted(made):
    """Steps are those of the optimizer, tokens those that are trained, the loss their mean."""
    trainer, fed = made(gradient_accumulation_steps=2, learning_rate=0.0), alone(steps=9)
    with torch.no_grad():
        loss = trainer.model(input_ids=ROW[None], labels=LABELS[None]).loss.item()
    assert fsl_async.hf.patch(trainer, fed=fed) is fed
    assert fed.model is trainer.model
    assert trainer.train().global_step == 9
    assert fed.status()["tokens"] == 9 * 2 * 2 * 4
    assert [step for step, _ in fed.history] == list(range(1, 10))
    assert all(metrics["loss"] == pytest.approx(loss, abs=1e-5) for _, metrics in fed.history)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, abs=1e-5)
    with pytest.raises(TaskError, match="has ended"):
        trainer.train()


def test_an_epoch_is_the_scripts_own(made):
    """Rows come in the order and number that the script alone would have."""
    trainer, fed = made(max_steps=-1, num_train_epochs=1, logging_steps=0.5), alone(steps=10)
    fsl_async.hf.patch(trainer, fed=fed)
    trainer.train()
    assert trainer.state.epoch == 2.5  # of 4 steps each
    logged = [one["step"] for one in trainer.state.log_history if "loss" in one]
    assert logged == [2, 4, 6, 8, 10]  # half of the script's 4 steps


class Rates(TrainerCallback):
    """The learning rate of each step."""

    def __init__(self):
        self.seen = []
        self.trainer = None  # transformers 4.49 gives a callback no optimizer

    def on_pre_optimizer_step(self, args, state, control, **_):  # noqa: D102
        self.seen.append(self.trainer.optimizer.param_groups[0]["lr"])


def test_rates_follow_the_run(made):
    """The Trainer's own warm-up would begin again in each round, and its decay end too early."""
    rates = Rates()
    trainer = made(callbacks=[rates], learning_rate=0.5, warmup_steps=100)
    rates.trainer = trainer
    train = {"schedule": "constant", "warmup_steps": 3, "rewarm_steps": 3}
    fsl_async.hf.patch(trainer, fed=alone(steps=6, train=train))
    trainer.train()
    assert rates.seen == [0.125, 0.125, 0.25, 0.375, 0.5, 0.5]


def test_a_rule_that_trains_one_factor_in_turn(made, monkeypatch):
    """Weights that do not train at first would be missing in the optimizer for ever."""
    rule = types.SimpleNamespace(
        exchanges_a=True,
        keeps_tail=False,
        has_patch=False,
        changes_basis=True,
        unequal_ranks=False,
        trains_a=lambda version: version % 2 == 1,
        trains_b=lambda version: version % 2 == 0,
    )
    monkeypatch.setattr("fsl_async.learn.client.fed.adapter_rule_named", lambda _: rule)
    trainer, fed = made(), alone(**LORA)
    fsl_async.hf.patch(trainer, fed=fed)
    weights = {name: w for name, w in trainer.model.named_parameters() if ".lora_" in name}
    trainer.train()
    held = {id(w) for group in trainer.optimizer.param_groups for w in group["params"]}
    assert held == {id(weight) for weight in weights.values()}
    assert all(weight.requires_grad == (".lora_B." in name) for name, weight in weights.items())
    assert len(trainer.optimizer.state) == len(weights) / 2
    fed._own_training.on_version(1)
    assert not trainer.optimizer.state  # moments of a basis that is gone
    assert all(weight.requires_grad == (".lora_A." in name) for name, weight in weights.items())


def test_the_last_step_evaluates_and_saves(made, tmp_path):
    """As the Trainer does at the end of its own count."""
    trainer = made(eval_strategy="steps", save_strategy="steps", load_best_model_at_end=True)
    fsl_async.hf.patch(trainer, fed=alone(**LORA))
    trainer.train()
    assert [one["step"] for one in trainer.state.log_history if "eval_loss" in one] == [5]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-5"]


def test_a_checkpoint_gives_its_optimizer_and_not_its_weights(made, tmp_path, capsys):
    """Its weights would go into a delta as if they had been trained; its moments are the site's."""
    first = made(save_strategy="steps", learning_rate=0.5)
    first.train()
    held = first.optimizer.state_dict()["state"]
    second = made(LlamaForCausalLM(config()))
    train = {"schedule": "constant", "warmup_steps": 0, "rewarm_steps": 0}
    fsl_async.hf.patch(second, fed=alone(steps=1, train=train))
    weights = [weight.clone() for weight in second.model.parameters()]
    seen = []

    class Look(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer=None, **_):
            seen.append(all(map(torch.equal, weights, second.model.parameters())))
            seen.append(optimizer.param_groups[0]["lr"])
            loaded = optimizer.state_dict()["state"]
            seen.append(all(torch.equal(held[n]["exp_avg"], loaded[n]["exp_avg"]) for n in held))

    second.add_callback(Look())
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert seen == [True, 5e-5, True]
    assert "weights are version 0 of the run" in capsys.readouterr().out
    assert second.state.global_step == 4  # its rows go on after the checkpoint's, too


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # of peft
def test_a_checkpoint_of_adapters_is_resumed_in_a_run_and_alone(made, tmp_path):
    """It had names that only this package knows: alone, all adapted layers were drawn anew."""
    LlamaForCausalLM(config()).save_pretrained(tmp_path / "base")

    def base():
        return LlamaForCausalLM.from_pretrained(tmp_path / "base")

    first = made(base(), save_strategy="steps", learning_rate=0.1)
    fsl_async.hf.patch(first, fed=alone(**LORA))
    first.train()
    folder = str(tmp_path / "checkpoint-5")
    model = peft.PeftModel.from_pretrained(base(), folder, is_trainable=True)
    for loaded in (model, LlamaForCausalLM.from_pretrained(folder)):
        found, wanted = (one.eval()(ROW[None]).logits for one in (loaded, first.model))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    held = [one["exp_avg"] for one in first.optimizer.state_dict()["state"].values()]
    again, in_run, computed = made(model, max_steps=6), made(base()), []
    fsl_async.hf.patch(in_run, fed=alone(steps=1, **LORA))
    for trainer in (again, in_run):
        seen = []

        class Look(TrainerCallback):
            def on_step_begin(self, *_, trainer=trainer, seen=seen, **__):
                computed.append(trainer.model(ROW[None]).logits)
                states = trainer.optimizer.state_dict()["state"].values()
                seen += [one["exp_avg"].clone() for one in states]

        trainer.add_callback(Look())
        assert trainer.train(resume_from_checkpoint=folder).global_step == 6
        assert all(map(torch.equal, seen[: len(held)], held))
    torch.testing.assert_close(computed[0], wanted, rtol=0, atol=1e-5)


def test_a_checkpoint_that_is_none(made, tmp_path):
    """One line, but for a script that resumes from the last one in each of its starts."""
    trainer = made()
    fsl_async.hf.patch(trainer, fed=alone())
    with pytest.raises(TaskError, match=r"has no trainer_state\.json"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "none"))
    trainer = made()
    fsl_async.hf.patch(trainer, fed=alone())
    assert trainer.train(resume_from_checkpoint=True).global_step == 5
    made(save_strategy="steps").train()
    trainer = made(LlamaForCausalLM(config(attention_bias=True)))
    fsl_async.hf.patch(trainer, fed=alone())
    with pytest.raises(TaskError, match="another model or optimizer"):
        trainer.train(resume_from_checkpoint=True)


class Launched(LocalFed):
    """A client that was killed after its last delta and started again."""

    def __init__(self, steps, position):
        self.lines = []
        super().__init__(
            ClientContext("alice", position=position, log=self.lines.append), steps=steps
        )

    def step(self, **done):
        """The delta is made within a step."""
        self.delta = self._own_training.facts["position"]()
        return super().step(**done)


class Rows(torch.utils.data.IterableDataset):
    """Data without a length."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


@pytest.mark.parametrize(
    "kind", [pytest.param("map", marks=pytest.mark.sweep), "stream", "workers"]
)
@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_a_relaunched_trainer_goes_on_after_its_last_delta(made, kind, accumulated):
    """It began at its first row each time."""

    def rows_of(steps, position):
        trainer = made(
            dataloader_num_workers=2 * (kind == "workers"),
            gradient_accumulation_steps=accumulated,
            seed=7,
            save_strategy="steps",
            save_steps=4,
        )
        rows = [{"input_ids": ROW, "labels": LABELS, "n": torch.tensor(n)} for n in range(13)]
        trainer.train_dataset = Rows(rows) if kind == "stream" else rows
        trainer.args.remove_unused_columns = False
        step, seen = trainer.training_step, []

        def training_step(model, inputs, *more, **named):
            seen.append(inputs.pop("n").tolist())
            return step(model, inputs, *more, **named)

        trainer.training_step = training_step
        fed = Launched(steps, position)
        fsl_async.hf.patch(trainer, fed=fed)
        trainer.train()
        assert fed.lines == []
        return seen, fed.delta, trainer.state.global_step

    whole, _, _ = rows_of(20, {})
    first = [row for batch in whole[:7] for row in batch]
    assert sorted(first) == list(range(13))
    seen, position = [], {}
    for steps in (2, 3, 6):  # within the first epoch, over its end, and from the second one on
        more, position, number = rows_of(steps, position)
        seen += more
    assert number == 11
    assert seen == whole[: len(seen)]
    assert len(seen) >= 11


def test_what_the_script_says_and_the_run_decides_is_a_line(made, capsys):
    """Who sets a cosine schedule should not believe that it is followed."""
    trainer = made(
        lr_scheduler_type="cosine",
        load_best_model_at_end=True,
        eval_strategy="steps",
        save_strategy="steps",
        train_sampling_strategy="group_by_length",
    )
    fsl_async.hf.patch(trainer, fed=alone())
    trainer.train()
    said = capsys.readouterr().out
    assert "from learning_rate=5e-05 on: lr_scheduler_type=cosine and its warm-up are not" in said
    assert "load_best_model_at_end is left out" in said
    assert "LengthGroupedSampler draws another order in each process" in said
    trainer = made()
    trainer.train_dataset = Rows(trainer.train_dataset)
    fsl_async.hf.patch(trainer, fed=alone())
    trainer.train()
    assert "max_steps=3 does not end training, the run does" in capsys.readouterr().out


def test_trainers_that_cannot_join(made):
    """One line before anything is joined or changed."""
    trainer = made()
    trainer.args._n_gpu = 2
    with pytest.raises(TaskError, match="2 devices"):
        fsl_async.hf.patch(trainer, fed=alone())
    trainer.args._n_gpu = 0
    fsl_async.hf.patch(trainer, fed=alone())
    with pytest.raises(TaskError, match="twice"):
        fsl_async.hf.patch(trainer, fed=alone())
    model = LlamaForCausalLM(config())
    optimizer = torch.optim.SGD(model.parameters())
    trainer = made(model, optimizers=(optimizer, None))
    with pytest.raises(TaskError, match="before the run's adapters"):
        fsl_async.hf.patch(trainer, fed=alone(**LORA))


class Ranks(LocalFed):
    """One of two ranks of a client."""

    def __init__(self, **settings):
        super().__init__(ClientContext("alice", config=settings, ranks=2), steps=5)


@pytest.fixture
def in_ranks(made, monkeypatch):
    """Make a Trainer that is the first of two processes; plugin: of accelerate, for FSDP."""

    def make(plugin=None):
        trainer = made()
        monkeypatch.setattr(type(trainer.args), "world_size", 2)
        state = types.SimpleNamespace(fsdp_plugin=plugin)
        monkeypatch.setattr(trainer.accelerator, "state", state)
        trainer.is_fsdp_enabled = plugin is not None
        return trainer

    return make


def test_processes_that_cannot_be_the_ranks_of_a_client(in_ranks, monkeypatch):
    """Each in one line, at all ranks, before one of them waits for another."""
    with pytest.raises(TaskError, match="as 2 processes, and this client has 1"):
        fsl_async.hf.patch(in_ranks(), fed=alone())
    trainer = in_ranks()
    trainer.is_deepspeed_enabled = True
    with pytest.raises(TaskError, match="DeepSpeed"):
        fsl_async.hf.patch(trainer, fed=Ranks())
    old, new = (types.SimpleNamespace(fsdp_version=version) for version in (1, 2))
    with pytest.raises(TaskError, match="FSDP of version 1"):
        fsl_async.hf.patch(in_ranks(old), fed=Ranks())
    with pytest.raises(TaskError, match="leave out fsdp"):
        fsl_async.hf.patch(in_ranks(new), fed=Ranks(**LORA))
    trainer = in_ranks()
    fed = Ranks()
    trainer.train_dataset = fed.shard(trainer.train_dataset)
    with pytest.raises(TaskError, match="without fed"):
        fsl_async.hf.patch(trainer, fed=fed)
    with pytest.raises(TaskError, match="rolora trains factors in turn"):
        fsl_async.hf.patch(in_ranks(), fed=Ranks(tune={"method": "lora", "rule": "rolora"}))
    trainer = in_ranks()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(TaskError, match="as 2 processes, and this client has 4"):
        fsl_async.hf.patch(trainer, "host:1")


def test_a_model_that_is_sharded_is_attached_when_it_is(in_ranks):
    """Its tensors are other ones before."""
    trainer, fed = in_ranks(types.SimpleNamespace(fsdp_version=2)), Ranks()
    fsl_async.hf.patch(trainer, fed=fed)
    assert fed.model is None
    trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
    assert fed.model is trainer.model


def test_a_callback_of_one_rank_stops_all(in_ranks, monkeypatch, capsys):
    """The others waited for its gradients until a timeout."""
    stops = []
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda mine: mine.add_(stops.pop()))
    trainer = in_ranks()
    trainer.args.fsdp = "full_shard"
    fsl_async.hf.patch(trainer, fed=Ranks())
    assert "fsdp has no effect" in capsys.readouterr().out
    trainer.state.max_steps = 9
    for stops[:], own, stopped in (([0], False, False), ([1], False, True), ([0], True, True)):
        trainer.control.should_training_stop = own
        handler = trainer.callback_handler
        control = handler.on_step_end(trainer.args, trainer.state, trainer.control)
        assert control.should_training_stop is stopped


def test_ranks_resume_from_the_same_checkpoint(in_ranks, monkeypatch, tmp_path):
    """With other moments their weights would part."""

    def gathered(found, mine):
        found[:] = [mine, ("checkpoint-4", True)]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gathered)
    trainer = in_ranks()
    fsl_async.hf.patch(trainer, fed=Ranks())
    with pytest.raises(TaskError, match="the ranks find different checkpoints"):
        trainer.train(resume_from_checkpoint=True)


def test_the_run_is_left_when_training_ends(made, monkeypatch):
    """Only then is the last delta sent; a script that fails must not leave its session behind."""
    fed, asked = Joined(), []
    monkeypatch.setattr(
        fsl_async, "join", lambda *server, **options: asked.append((server, options)) or fed
    )
    trainer = made()
    assert fsl_async.hf.patch(trainer, "host:1", rank=2, allow="adapters") is fed
    assert asked == [(("host:1",), {"rank": 2, "allow": "adapters"})]
    assert fed.left == []
    trainer.train()
    assert fed.left == [None]

    class Failing(TrainerCallback):
        def on_step_begin(self, *_, **__):
            raise KeyError("mine")

    fed = Joined()
    trainer = made(callbacks=[Failing()])
    fsl_async.hf.patch(trainer, "host:1")
    with pytest.raises(KeyError):
        trainer.train()
    assert [type(error) for error in fed.left] == [KeyError]

    fed = Joined(tune={"method": "zeroth"})
    with pytest.raises(TaskError):
        fsl_async.hf.patch(made(), "host:1")
    assert [type(error) for error in fed.left] == [TaskError]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_model_keeps_adapters_of_its_own(made):
    """They are what trains, so they are what is exchanged."""
    torch.manual_seed(0)
    settings = peft.LoraConfig(r=3, target_modules=["q_proj"])
    trainer = made(peft.get_peft_model(LlamaForCausalLM(config()), settings), learning_rate=0.1)
    fed = alone(**LORA)
    fsl_async.hf.patch(trainer, fed=fed)
    trainer.train()
    assert fed.adapters is None
    assert fed.model is trainer.model
    losses = [metrics["loss"] for _, metrics in fed.history]
    assert losses[-1] < losses[0]
