"""Answers that a model draws, and the site's own function that rates them."""

import importlib.util
import json

import numpy as np
import pytest
import torch

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import tiny_base

from fsl_async.config.settings_tuning import TuneConfig
from fsl_async.errors import DataError, TaskError
from fsl_async.learn.models.adapters import apply_lora
from fsl_async.learn.tune import answers as module
from fsl_async.learn.tune.answers import Answers, Prompts, load_reward, uniforms_of
from fsl_async.learn.tune.base import load_base
from fsl_async.learn.tune.objectives.grpo import Grpo, advantages_of
from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import UNTRAINED

TUNE = TuneConfig(method="lora", objective="grpo", group=3, answer_tokens=5, context=64)


def prompts_of(tmp_path, rows, most=40, **how):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Prompts(Records(path, "grpo"), tiny_base.tokenizer(**how), most)


@pytest.fixture
def base(tmp_path):
    return load_base(tiny_base.write_llama(tmp_path / "base"), "lm")


def reward_of(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return load_reward(str(path))


def test_a_step_of_a_round_has_the_same_answers_again(tmp_path, base):
    """A site that is killed in a round and comes back gives the ones that it gave."""
    base.model.generation_config.repetition_penalty = 3.0  # the folder's taste does not count
    prompts = prompts_of(tmp_path, [{"prompt": "a"}, {"prompt": "some more words"}]).at([0, 1])
    seen = []

    def reward(prompt, answer, row):
        seen.append((prompt, answer, row))
        return float(len(seen) % 3)

    answers = Answers(base.model, base.tokenizer, reward, TUNE)
    one, again = (answers.batch(prompts, uniforms_of(1, "answers/a/4/0")) for _ in range(2))
    other = answers.batch(prompts, uniforms_of(1, "answers/a/4/1"))
    assert np.array_equal(one.ids, again.ids)
    assert not np.array_equal(one.ids, other.ids)
    assert [prompt for prompt, _, _ in seen[:6]] == ["a"] * 3 + ["some more words"] * 3
    assert seen[0][2] == {"prompt": "a"}
    assert one.metrics["flat"] == 0
    assert base.model.generation_config.repetition_penalty == 3.0
    trained = (one.labels != UNTRAINED).sum(1)
    assert trained.max() <= 5
    assert trained.min() >= 1
    plain = len(prompts[0].ids)
    assert (one.labels[0, :plain] == UNTRAINED).all()
    assert one.labels[0, plain] == one.ids[0, plain]


def test_tokens_are_drawn_by_their_probabilities():
    scores = torch.log(torch.tensor([0.5, 0.2, 0.3, 0.0])).repeat(4000, 1)
    chosen = module._Drawn(uniforms_of(3, "x"))(None, scores).argmax(1)
    shares = torch.bincount(chosen, minlength=4) / 4000
    assert torch.allclose(shares, torch.tensor([0.5, 0.2, 0.3, 0.0]), atol=0.03)


def test_the_likeliest_answer_is_that_of_the_model(tmp_path, base):
    (prompt,) = prompts_of(tmp_path, [{"prompt": "hello"}]).at([0])
    (drawn,) = Answers(base.model, base.tokenizer, lambda *_: 0.0, TUNE).draw([prompt], None)
    ids = list(prompt.ids)
    for token in drawn:
        with torch.no_grad():
            assert base.model(torch.tensor([ids])).logits[0, -1].argmax() == token
        ids.append(token)


def test_a_group_of_equal_rewards_teaches_nothing():
    found = advantages_of(np.array([[1, 1, 1, 1], [0, 0, 0, 1]], np.float32))
    assert (found[0] == 0).all()
    np.testing.assert_allclose(found[1], [-0.5, -0.5, -0.5, 1.5], atol=1e-3)


def test_rewards_count_less_far_from_the_base(tmp_path, base):
    """At twice the limit nothing is left but the way back to the base."""
    apply_lora(base.model)
    for name, weight in base.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=3.0, generator=torch.Generator().manual_seed(1))
    prompts = prompts_of(tmp_path, [{"prompt": "a"}]).at([0])
    answers = Answers(base.model, base.tokenizer, lambda *_: 0.0, TUNE)
    batch = answers.batch(prompts, uniforms_of(1, "x"))
    batch.advantages[:] = [1, -1, 0.5]
    kl = Grpo(0.0, 0.0).loss(base.model, batch).metrics["kl"]
    assert kl > 0.1
    norms = []
    for limit in (0.0, 2 * kl, kl / 1.5, kl / 2):
        base.model.zero_grad()
        Grpo(0.0, limit).loss(base.model, batch).loss.backward()
        given = (w.grad for w in base.model.parameters() if w.grad is not None)
        norms.append(float(sum(one.square().sum() for one in given) ** 0.5))
    assert norms[0] > 1e-3
    assert np.array(norms[1:]) / norms[0] == pytest.approx([1, 0.5, 0], abs=1e-4)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def reward(prompt, answer): return 'good'", "returned 'good': it must return a finite"),
        ("def reward(prompt, answer): return 1e999", "returned inf: it must return a finite"),
        ("def reward(prompt, answer): return None", "returned None"),
        ("def reward(prompt, answer): return 1 / 0", "mine.py:1 raised ZeroDivisionError"),
    ],
)
def test_a_wrong_reward_is_one_line(tmp_path, text, says):
    with pytest.raises(TaskError, match=says):
        reward_of(tmp_path, text)("a", "b", {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def other(prompt, answer): return 0", "has no function 'reward'; it has other"),
        ("def reward(prompt): return 0", "reward must take 2 arguments, prompt, answer"),
    ],
)
def test_a_file_without_a_reward_is_one_line(tmp_path, text, says):
    with pytest.raises(TaskError, match=says):
        reward_of(tmp_path, text)
    with pytest.raises(TaskError, match=r"give this client --reward FILE.py"):
        load_reward("")


def test_a_reward_may_read_the_record(tmp_path):
    rated = reward_of(tmp_path, "def reward(prompt, answer, row): return row['solution'] == answer")
    assert rated("1 + 1", "2", {"solution": "2"}) == 1.0


def test_prompts_are_texts_or_messages_and_what_does_not_fit_is_counted(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}, {"prompt": [{"role": "x"}]}]
    found = prompts_of(tmp_path, rows, chat=True)
    assert len(found) == 1
    assert tiny_base.tokenizer().decode(found.at([0])[0].ids) == "<user>hi</s><assistant>"
    assert "1 of 2 rows used" in found.summary
    with pytest.raises(DataError, match=r"no prompt can be used: 1 longer than 40 tokens"):
        prompts_of(tmp_path, [{"prompt": "x" * 60}])
    with pytest.raises(DataError, match="the tokenizer has no chat template"):
        prompts_of(tmp_path, rows[:1])
