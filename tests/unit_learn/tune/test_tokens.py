"""Samples as token ids: what is trained, cut, padded and shuffled.

A token is a byte (tiny_base).
"""

import importlib.util
import json

import numpy as np
import pytest

from fsl_async.errors import DataError

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import tiny_base
from tiny_base import BEGIN, END, PAD
from tokenizers import models, pre_tokenizers

from fsl_async.learn.tune.records import Records
from fsl_async.learn.tune.tokens import UNTRAINED, tokenize


def tokens(tmp_path, rows, objective="lm", *, context=64, tokenizer=None, **more):
    path = tmp_path / "notes.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    read = Records(path, objective, more.get("labels", ()))
    return tokenize(read, tokenizer or tiny_base.tokenizer(), objective, context=context, **more)


def spell(tokenizer, ids):
    """Text of ids, with special tokens."""
    return tokenizer.decode(ids)


def trained_text(found, tokenizer, row=0):
    labels = found.batch([row]).labels[0]
    return spell(tokenizer, labels[labels != UNTRAINED])


def whole_text(found, tokenizer, row=0):
    batch = found.batch([row])
    return spell(tokenizer, batch.ids[0][batch.mask[0] == 1])


ROW = {"prompt": "2+2?", "completion": "four"}
CHAT = {
    "messages": [
        {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c?"},
        {"role": "assistant", "content": "d"},
    ]
}


@pytest.mark.parametrize(
    ("row", "chat", "trained_on", "texts"),
    [
        (ROW, False, "completion", ("<s>2+2?\nfour</s>", "four</s>")),
        (ROW, False, "all", ("<s>2+2?\nfour</s>", "2+2?\nfour</s>")),
        (ROW, True, "completion", ("<user>2+2?</s><assistant>four</s>", "four</s>")),
        ({"prompt": "x ", "completion": "y"}, False, "completion", ("<s>x y</s>", "y</s>")),
        ({"text": "abc"}, False, "completion", ("<s>abc</s>", "abc</s>")),
        (
            CHAT,
            True,
            "completion",
            ("<user>a?</s><assistant>b</s><user>c?</s><assistant>d</s>", "b</s>d</s>"),
        ),
        (
            CHAT,
            False,
            "completion",
            ("<s>User: a?\nAssistant: b</s>\nUser: c?\nAssistant: d</s>", " b</s> d</s>"),
        ),
    ],
)
def test_what_is_trained(tmp_path, row, chat, trained_on, texts):
    """The completion and its end, or all, by the chat template where there is one."""
    tokenizer = tiny_base.tokenizer(chat=chat)
    found = tokens(tmp_path, [row], tokenizer=tokenizer, trained_on=trained_on)
    assert (whole_text(found, tokenizer), trained_text(found, tokenizer)) == texts
    assert found.tokens == found.batch([0]).trained


def test_the_first_token_is_never_trained(tmp_path):
    """Nothing predicts it: a tokenizer without a begin token would count one token too many."""
    tokenizer = tiny_base.tokenizer()
    tokenizer.bos_token = None
    found = tokens(tmp_path, [{"text": "abc"}], tokenizer=tokenizer)
    assert trained_text(found, tokenizer) == "bc</s>"
    assert found.tokens == 3


def test_turns_that_a_template_rewrites_are_samples_of_their_own(tmp_path):
    """Templates of thinking models drop thoughts from earlier turns: each is trained as last."""
    tokenizer = tiny_base.tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>"
        "{{ m.content if loop.last or m.role == 'user' else '' }}!"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = tokens(tmp_path, [CHAT], tokenizer=tokenizer)
    assert [
        (whole_text(found, tokenizer, n), trained_text(found, tokenizer, n)) for n in (0, 1)
    ] == [("<user>a?!<assistant>b!", "b!"), ("<user>a?!<assistant>!<user>c?!<assistant>d!", "d!")]
    assert "1 of 1 rows used; 2 samples;" in found.summary
    private = tokens(tmp_path, [CHAT], tokenizer=tokenizer, one_each=True)
    assert len(private) == 1, "noise hides one sample, so a record must not be two"
    assert trained_text(private, tokenizer) == "d!"
    short = tokens(tmp_path, [CHAT], tokenizer=tokenizer, context=22)
    assert "1 of 1 rows used; 1 sample; 1 more without a trained token within 22" in short.summary


def test_a_chat_is_tokenized_whole(tmp_path):
    """Tokenizers of SentencePiece put a space before each text, also before an answer alone."""
    tokenizer = tiny_base.tokenizer(chat=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    found = tokens(tmp_path, [{"messages": CHAT["messages"][:2]}], tokenizer=tokenizer)
    assert whole_text(found, tokenizer) == " <user>a?</s> <assistant>b</s>"
    assert trained_text(found, tokenizer) == "b</s>"
    # A token that begins in the prompt and ends in the answer is trained, as transformers masks it.
    tokenizer = tiny_base.tokenizer(chat=True)
    vocabulary = {**tokenizer.get_vocab(), ">b": tiny_base.VOCABULARY}
    tokenizer.backend_tokenizer.model = models.BPE(vocabulary, [(">", "b")], unk_token="[UNK]")
    together = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = together
    found = tokens(tmp_path, [{"messages": CHAT["messages"]}], tokenizer=tokenizer)
    assert trained_text(found, tokenizer) == ">b</s>d</s>"
    # A tokenizer in Python does not tell where tokens are.
    tokenizer = tiny_base.tokenizer(chat=True)
    tokenizer.__class__ = type("Slow", (type(tokenizer),), {"is_fast": False})
    found = tokens(tmp_path, [{"messages": CHAT["messages"]}], tokenizer=tokenizer)
    assert trained_text(found, tokenizer) == "b</s>d</s>"


def test_rows_that_the_template_refuses_are_counted(tmp_path):
    """Many templates raise for roles that they do not have."""
    tokenizer = tiny_base.tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}"
        "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tool = {"messages": [{"role": "tool", "content": "x"}, *CHAT["messages"]]}
    found = tokens(tmp_path, [CHAT, tool], tokenizer=tokenizer)
    assert len(found) == 1
    assert "1 of 2 rows used; 1 refused by the chat template (no tools);" in found.summary
    with pytest.raises(
        DataError, match=r"no row is left to train on: .* 0 of 1 rows used; 1 refused"
    ):
        tokens(tmp_path, [tool], tokenizer=tokenizer)


CALLS = {
    "messages": [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "four"},
    ],
    "tools": [{"name": "add", "parameters": {}}],
}


def test_calls_of_tools_are_trained_and_their_results_are_not(tmp_path):
    """A call is what the model writes; what a tool returns is not."""
    tokenizer = tiny_base.tokenizer(chat=True)
    tokenizer.chat_template = (
        "{% for t in tools %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}<{{ m.role }}>"
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = tokens(tmp_path, [CALLS], tokenizer=tokenizer, context=200)
    call = '{"name": "add", "arguments": {"a": 2, "b": 2}}</s>'
    assert trained_text(found, tokenizer) == f"{call}four</s>"
    assert whole_text(found, tokenizer) == (
        f"[add]<user>2+2?</s><assistant>{call}<tool>4</s><assistant>four</s>"
    )
    for chat in (True, False):  # a template without tools; no template
        with pytest.raises(DataError, match=r"0 of 1 rows used; 1 w.* tools"):
            tokens(tmp_path, [CALLS], tokenizer=tiny_base.tokenizer(chat=chat), context=200)


def test_answers_of_preferences_may_hold_calls(tmp_path):
    """All that the assistant writes behind the prompt is trained, the prompt's turns are not."""
    tokenizer = tiny_base.tokenizer(chat=True)
    first, second = CHAT["messages"][:2], CHAT["messages"][2:]
    row = {"prompt": [*first, second[0]], "chosen": second[1:], "rejected": first[1:]}
    found = tokens(tmp_path, [row], "dpo", tokenizer=tokenizer)
    batch = found.batch([0])
    texts = [spell(tokenizer, row[row != UNTRAINED]) for row in batch.labels]
    assert texts == ["d</s>", "b</s>"]


def test_samples_are_cut_and_those_without_trained_tokens_left_out(tmp_path):
    """A prompt above the context leaves nothing to learn; the line for people counts it."""
    rows = [
        ROW,
        {"prompt": "p" * 6, "completion": "c" * 50},
        {"prompt": "p" * 80, "completion": "c"},
    ]
    rows.append({"prompt": "p"})
    found = tokens(tmp_path, rows, context=16)
    assert len(found) == 2
    batch = found.batch([0, 1])
    assert batch.ids.shape == (2, 16)
    assert batch.mask.sum(1).tolist() == [11, 16]
    # <s>2+2?\nfour</s> trains 5 of 11, <s>pppppp\ncccccccc 8 of 16
    assert (batch.labels != UNTRAINED).sum(1).tolist() == [5, 8]
    assert found.tokens == batch.trained == 13
    assert found.summary == (
        "notes.jsonl: prompt + completion, 2 of 4 rows used; 1 without completion (line 4),"
        " 1 without a trained token within 16 tokens; 1 cut at 16 tokens; 48 % of tokens trained"
    )
    with pytest.raises(DataError, match=r"0 of 2 rows used; .* 1 without a trained token within 8"):
        tokens(tmp_path, rows[2:], context=8)


def test_padding_is_told_by_the_mask(tmp_path):
    """With the end token as padding, the end of a completion is trained and padding is not."""
    tokenizer = tiny_base.tokenizer(pad_is_end=True)
    found = tokens(tmp_path, [ROW, {"text": "long", **ROW, "completion": "12345678"}],
                   tokenizer=tokenizer)  # fmt: skip
    batch = found.batch([0, 1])
    assert found.pad == END
    assert batch.mask[0].tolist() == [1] * 11 + [0] * 4
    assert batch.ids[0, 10:].tolist() == [END] * 5
    assert batch.labels[0, 10:].tolist() == [END] + [UNTRAINED] * 4
    tokenizer = tiny_base.tokenizer()
    tokenizer.pad_token = None
    assert tokens(tmp_path, [ROW], tokenizer=tokenizer).pad == END


def test_classify_keeps_the_end_token_of_a_cut_text(tmp_path):
    """An encoder was trained with it; labels are one a sample."""
    rows = [{"text": "x" * n, "label": n % 2} for n in (2, 20, 5)]
    found = tokens(
        tmp_path,
        rows,
        "classify",
        context=8,
        labels=("no", "yes"),
        tokenizer=tiny_base.tokenizer(encoder=True),
    )
    batch = found.batch([0, 1, 2])
    x = batch.ids[0, 1]
    assert batch.ids[1].tolist() == [BEGIN, *[x] * 6, END]
    assert batch.ids[0].tolist() == [BEGIN, x, x, END, *[PAD] * 4]
    assert batch.labels.tolist() == [0, 0, 1]
    assert found.tokens == batch.trained == 3
    assert found.summary == (
        "notes.jsonl: text + label, 3 of 3 rows used; 1 cut at 8 tokens; no 67 %, yes 33 %"
    )


def test_classify_leaves_no_padding_id_at_the_end(tmp_path):
    """Decoders read the last token that is no padding, by its id."""
    tokenizer = tiny_base.tokenizer(encoder=True, pad_is_end=True)
    found = tokens(tmp_path, [{"text": "ab", "label": 0}], "classify", labels=("a", "b"),
                   tokenizer=tokenizer)  # fmt: skip
    assert whole_text(found, tokenizer) == "<s>ab"


def test_preferences_are_two_sequences(tmp_path):
    """Chosen and rejected are side by side, so that a batch is one forward pass."""
    rows = [{"prompt": "p", "chosen": "yes", "rejected": "n"}, {"prompt": "q" * 99, "chosen": "a",
            "rejected": "b"}]  # fmt: skip
    tokenizer = tiny_base.tokenizer()
    found = tokens(tmp_path, rows, "dpo", tokenizer=tokenizer)
    assert len(found) == 1
    batch = found.batch([0])
    texts = [spell(tokenizer, row[row != UNTRAINED]) for row in batch.labels]
    assert texts == ["yes</s>", "n</s>"]
    assert batch.rows.tolist() == [0]
    assert found.tokens == 6


def numbered(tmp_path, count=10, labels=None):
    rows = [{"text": f"{n:03}", "label": labels[n] if labels else 0} for n in range(count)]
    return tokens(tmp_path, rows, "classify", labels=("a", "b", "c"))


def test_every_epoch_has_each_sample_once_in_an_order_of_its_own(tmp_path):
    """The order follows from (seed, name, epoch), and a relaunched client continues in it."""
    data = numbered(tmp_path)

    def rows(count, **more):
        given = {"seed": 1, "name": "site-a"} | more
        batches = data.shuffled(4, **given)
        return [next(batches).rows.tolist() for _ in range(count)]

    found = rows(10)
    flat = [row for batch in found for row in batch]
    epochs = [flat[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert rows(10) == found
    assert rows(3, start=7) == found[7:]
    assert rows(10, name="site-b") != found
    assert rows(10, seed=2) != found
    large = data.shuffled(25, seed=1, name="site-a")
    assert next(large).rows.tolist() + next(large).rows.tolist()[:15] == flat


def test_balanced_batches_hold_as_many_of_each_label(tmp_path):
    """Rows of the rarer label repeat, all of them, and an epoch has all of the others once."""
    found = numbered(tmp_path, 10, labels=[0] * 8 + [1] * 2)
    batches = found.shuffled(4, seed=1, name="a", balanced=True)
    epoch = [next(batches) for _ in range(4)]
    assert all(sorted(batch.labels.tolist()) == [0, 0, 1, 1] for batch in epoch)
    rows = np.concatenate([batch.rows for batch in epoch]).tolist()
    assert sorted(rows) == sorted([*range(8), *[8, 9] * 4])
    again = found.shuffled(4, seed=1, name="a", balanced=True, start=2)
    assert next(again).rows.tolist() == epoch[2].rows.tolist()
    one_label = numbered(tmp_path, 6, labels=[1] * 6).shuffled(3, seed=1, name="a", balanced=True)
    assert sorted([*next(one_label).rows, *next(one_label).rows]) == list(range(6))


@pytest.mark.parametrize(
    ("labels", "classes", "balance"),
    [([0, 0, 1, 1], 2, 1.0), ([1, 1, 1], 2, 0.0), ([0, 1, 1, 1], 2, 0.75), ([0, 1, 2], 3, 1.0)],
)
def test_the_balance_of_labels(tmp_path, labels, classes, balance):
    """Of two labels 4 p (1 - p); of any number 1 where all are equally frequent."""
    assert numbered(tmp_path, len(labels), labels=labels).balance(classes) == pytest.approx(balance)


def test_the_last_part_is_held_out(tmp_path):
    """The last of each label: files are often sorted by label, and one class shows nothing."""
    data = numbered(tmp_path, 20, labels=[0] * 10 + [1] * 10)
    train, held = data.split(0.2)
    assert held.rows.tolist() == [8, 9, 18, 19]
    assert train.rows.tolist() == [*range(8), *range(10, 18)]
    assert held.label_counts(2) == [2, 2]
    assert held.batch([3]).ids.tolist() == data.batch([19]).ids.tolist()
    texts = tokens(tmp_path, [{"text": f"{n}"} for n in range(10)])
    train, held = texts.split(0.3)
    assert held.rows.tolist() == [7, 8, 9]
    assert train.tokens + held.tokens == texts.tokens
    assert texts.split(0.02)[1].rows.tolist() == [9], "at least one"
    assert texts.split(0.0)[1] is None
    sizes = [len(batch.rows) for batch in texts.batches(4)]
    assert sizes == [4, 4, 2]


def test_many_samples_are_tokenized_in_pieces(tmp_path):
    """Pieces must not change the samples or their order."""
    data = tokens(tmp_path, [{"text": f"{n:04}"} for n in range(600)])
    tokenizer = tiny_base.tokenizer()
    assert [whole_text(data, tokenizer, n) for n in (0, 255, 256, 599)] == [
        f"<s>{n:04}</s>" for n in (0, 255, 256, 599)
    ]
    assert data.ids.dtype == np.int32


def test_long_chats_are_tokenized_in_pieces_of_characters(tmp_path, monkeypatch):
    """Rows of many turns are many samples, whose lists of tokens would fill the memory."""
    rows = [{"messages": CHAT["messages"][:2]}] * 9
    tokenizer = tiny_base.tokenizer(chat=True)
    wanted = tokens(tmp_path, rows, tokenizer=tokenizer)
    monkeypatch.setattr("fsl_async.learn.tune.tokens._CHARACTERS_AT_ONCE", 40)
    calls, call = [], type(tokenizer).__call__

    def counted(self, texts, **options):
        calls.append(len(texts))
        return call(self, texts, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    found = tokens(tmp_path, rows, tokenizer=tokenizer)
    assert max(calls) == 2
    assert found.ids.tolist() == wanted.ids.tolist()
    assert found.trained.tolist() == wanted.trained.tolist()


def test_rated_completions_come_with_their_rating_in_each_batch(tmp_path):
    rows = [{"prompt": "a", "completion": f"b{n}", "label": n % 2 == 0} for n in range(5)]
    found = tokens(tmp_path, rows, "kto")
    assert found.batch([1, 2, 4]).goods.tolist() == [0, 1, 1]
    assert trained_text(found, tiny_base.tokenizer(), 0).startswith("b0")
    assert "bad 40 %, good 60 %" in found.summary
    mine, held = found.split(0.5)
    assert sorted(held.batch(range(len(held))).goods.tolist()) == [0, 1]
    assert len(mine) == 3
