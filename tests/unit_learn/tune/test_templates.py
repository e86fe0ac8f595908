"""Chats by chat templates: what is trained of a text, and which chats a template leaves out."""

import importlib.util
import json
from pathlib import Path

import pytest

if not importlib.util.find_spec("transformers"):
    pytest.skip("needs the extra hf", allow_module_level=True)

import tiny_base

from fsl_async.learn.tune.templates import UnfitError, chat_of, render, tools_of, turns_of

USER = {"role": "user", "content": "Dose?"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "abcdefghi", "function": {"name": "dose", "arguments": {"drug": "x y", "kg": 71.5}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "name": "dose", "content": '{"mg": 4}'}
ANSWER = {"role": "assistant", "content": "4 mg"}
THOUGHT = {**ANSWER, "reasoning_content": "71.5 kg"}
TOOLS = [{"name": "dose", "description": "d", "parameters": {"type": "object", "properties": {}}}]

ASKS = "{% if add_generation_prompt %}<assistant>{% endif %}"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + ASKS
WITH_TOOLS = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}</s>{% endfor %}" + ASKS
)
# As DeepSeek's: arguments as text, and the prompt for an answer opens a thought.
BY_TEXT = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
# As Llama's: no content beside calls, results as JSON.
AS_JSON = (
    "{% for m in messages %}<{{ m.role }}>{% if 'tool_calls' in m %}{{ m.tool_calls | tojson }}"
    "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "</s>{% endfor %}" + ASKS
)
# As Qwen3's: thoughts of the last turn only.
FORGETS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if loop.last and m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}</s>{% endfor %}" + ASKS
)
MARKED = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
# As Phi's: the end token ends the whole chat.
ENDED = PLAIN.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}").replace("</s>", "!")
# As those of models of pictures: contents are parts.
IN_PARTS = PLAIN.replace("m.content", "m.content[0].text")
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<system>Help.</s>{% endif %}" + PLAIN
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{% endfor %}" + PLAIN
)

CALLED = "<user>Dose?</s><assistant>{{{}</s>}}<tool>{}</s><assistant>{{{}</s>}}"
FIRST = "<user>Dose?</s><assistant>{(71.5 kg)4 mg</s>}"
FULL_CALLS = [{"id": "abcdefghi", "type": "function", **CALL["tool_calls"][0]}]


def rendered(template, messages, tools=None, **more):
    """The texts of a chat, each with what is trained in brackets."""
    tokenizer = tiny_base.tokenizer(chat=True)
    tokenizer.chat_template = template
    chat = chat_of(turns_of(messages, "messages"), tools_of(tools))
    found = render(chat, tokenizer, **more)
    return ["".join(f"{{{text}}}" if on else text for text, on in one.cut()) for one in found]


@pytest.mark.parametrize(
    ("template", "messages", "tools", "text"),
    [
        (
            PLAIN,
            [USER, ANSWER, USER, ANSWER],
            None,
            "<user>Dose?</s><assistant>{4 mg</s>}<user>Dose?</s><assistant>{4 mg</s>}",
        ),
        (
            WITH_TOOLS,
            [USER, CALL, RESULT, THOUGHT],
            None,
            CALLED.format('dose({"drug": "x y", "kg": 71.5})', '{"mg": 4}', "71.5 kg4 mg"),
        ),
        (
            BY_TEXT,
            [USER, CALL, RESULT, ANSWER],
            None,
            CALLED.format('dose{"drug": "x y", "kg": 71.5}', '{"mg": 4}', "4 mg"),
        ),
        (
            AS_JSON,
            [USER, CALL, RESULT, ANSWER],
            None,
            CALLED.format(json.dumps(FULL_CALLS), json.dumps('{"mg": 4}'), "4 mg"),
        ),
        (
            FORGETS,
            [USER, THOUGHT, USER, THOUGHT],
            None,
            f"{FIRST} + <user>Dose?</s><assistant>4 mg</s>{FIRST}",
        ),
        (
            MARKED,
            [USER, ANSWER, USER, ANSWER],
            None,
            "<user>Dose?</s><assistant>{4 mg</s>}<user>Dose?</s><assistant>{4 mg</s>}",
        ),
        (MARKED, [ANSWER, USER], None, "<assistant>{4 mg</s>}<user>Dose?</s>"),
        # By the mask it would train both.
        (
            MARKED,
            [USER, {**ANSWER, "weight": 0}, USER, ANSWER],
            None,
            "<user>Dose?</s><assistant>4 mg</s><user>Dose?</s>{<assistant>4 mg</s>}",
        ),
        (
            ENDED,
            [USER, ANSWER, USER, ANSWER],
            None,
            "<user>Dose?!<assistant>{4 mg!}<user>Dose?!<assistant>{4 mg!</s>}",
        ),
        (IN_PARTS, [USER, ANSWER], None, "<user>Dose?</s><assistant>{4 mg</s>}"),
        (
            DEFAULT_SYSTEM,
            [USER, ANSWER],
            None,
            "<system>Help.</s><user>Dose?</s><assistant>{4 mg</s>}",
        ),
        (ALTERNATES, [USER, ANSWER], None, "<user>Dose?</s><assistant>{4 mg</s>}"),
        # The prompt opens a thought, and the answer something else with the same sign.
        (
            BY_TEXT,
            [USER, {"role": "assistant", "content": "<b>4</b> mg"}],
            None,
            "<user>Dose?</s><assistant>{<b>4</b> mg</s>}",
        ),
        # What follows the last answer is left out.
        (PLAIN, [USER, ANSWER, USER], None, "<user>Dose?</s><assistant>{4 mg</s>}"),
    ],
)
def test_what_the_assistant_writes_is_trained(template, messages, tools, text):
    """Each turn once, with its calls and reasoning, as the model will meet it."""
    assert " + ".join(rendered(template, messages, tools)) == text


@pytest.mark.parametrize(
    ("template", "messages", "tools", "reason"),
    [
        (
            PLAIN,
            [USER, CALL, RESULT, ANSWER],
            None,
            "whose tool calls the chat template leaves out",
        ),
        (PLAIN, [USER, ANSWER], TOOLS, "whose tools the chat template leaves out"),
        (PLAIN, [USER, THOUGHT], None, "whose reasoning the chat template leaves out"),
        (
            WITH_TOOLS.replace(
                "<{{ m.role }}>", "{% if m.role == 'tool' %}{% continue %}{% endif %}"
            ),
            [USER, CALL, RESULT, ANSWER],
            TOOLS,
            "leaves out a message of role tool",
        ),
        # The call must be in its turn; that others have its words does not count.
        (
            "{{ tools | tojson }}" + PLAIN,
            [{"role": "user", "content": "dose of x y, 71.5 kg?"}, CALL, RESULT, ANSWER],
            TOOLS,
            "whose tool calls the chat template leaves out",
        ),
        (
            WITH_TOOLS.replace("in m.tool_calls", "in (m.tool_calls or [])[:1]"),
            [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2 + [{"name": "other"}]}, RESULT],
            None,
            "whose tool calls the chat template leaves out",
        ),
        (ALTERNATES, [USER, USER, ANSWER], None, "refused by the chat template .Roles must alter"),
        ("{{ oops }", [USER, ANSWER], None, "refused by the chat template"),
        (PLAIN, [ANSWER], None, "whose only trained message has no prompt"),
    ],
)
def test_what_a_template_leaves_out_is_refused(template, messages, tools, reason):
    """Trained without its calls, a chat teaches empty answers."""
    # A chat that is trained whole needs no prompt, and its turns are not looked for.
    for whole in {False, messages[0] is USER}:
        with pytest.raises(UnfitError, match=reason):
            rendered(template, messages, tools, whole=whole)


def test_an_answer_of_preferences_is_one_text():
    """Two answers of several turns are compared as wholes."""
    with pytest.raises(UnfitError, match="whose turns the chat template rewrites"):
        rendered(FORGETS, [USER, THOUGHT, USER, THOUGHT], once=True)
    assert rendered(PLAIN, [USER, ANSWER], whole=True) == ["{<user>Dose?</s><assistant>4 mg</s>}"]


def templates():
    """Chat templates of real models, by name, where a package that has them is installed."""
    found = importlib.util.find_spec("trl")
    folder = Path(found.origin).parent / "chat_templates" if found and found.origin else Path("-")
    return {path.stem: path for path in sorted(folder.glob("*.jinja"))}


@pytest.mark.skipif(not templates(), reason="needs the chat templates of the package trl")
@pytest.mark.parametrize("name", templates())
def test_templates_of_real_models_train_all_answers_or_refuse(name):
    """All take a chat of two turns; those for tools take calls; others refuse them."""
    template = templates()[name].read_text(encoding="utf-8")
    plain = [
        USER,
        {"role": "assistant", "content": "aa"},
        USER,
        {"role": "assistant", "content": "bb"},
    ]
    trained = "".join(rendered(template, plain))
    assert trained.count("{") >= 1
    for text in ("aa", "bb"):
        assert any(text in part.partition("}")[0] for part in trained.split("{")[1:])
    try:
        called = "".join(rendered(template, [USER, CALL, RESULT, ANSWER], TOOLS))
    except UnfitError:
        assert not name.startswith(("qwen3", "llama3_1", "deepseekv3", "glm4", "gptoss"))
    else:
        assert "dose" in called
        assert "71.5" in called
