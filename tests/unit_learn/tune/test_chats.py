"""Messages of several formats become those that chat templates take."""

import json

import pytest

from fsl_async.learn.tune.templates import Chat, UnfitError, chat_of, text_turn, tools_of, turns_of

USER = {"role": "user", "content": "2+2?"}
ARGUMENTS = {"a": 2, "b": None}
FUNCTION = {"name": "add", "arguments": ARGUMENTS}
CALL = {"type": "function", "function": FUNCTION}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
SPELLED = {"name": "add", "arguments": json.dumps(ARGUMENTS)}


@pytest.mark.parametrize(
    ("message", "turn"),
    [
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, CALLING),
        ({"role": "assistant", "tool_calls": [{"function": SPELLED}]}, CALLING),
        ({"role": "assistant", "tool_calls": json.dumps([FUNCTION])}, CALLING),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
        ),
        ({"role": "assistant", "content": None, "function_call": SPELLED}, CALLING),
        ({"from": "function_call", "value": json.dumps(FUNCTION)}, CALLING),
        ({"from": "function_call", "value": json.dumps([SPELLED])}, CALLING),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "now", "arguments": ""}}]},
            {
                "role": "assistant",
                "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}],
            },
        ),
        ({"from": "observation", "value": "4"}, {"role": "tool", "content": "4"}),
        (
            {"role": "function", "name": "add", "content": "4"},
            {"role": "tool", "name": "add", "content": "4"},
        ),
        (
            {"role": "tool", "tool_call_id": "c1", "content": {"sum": 4}},
            {"role": "tool", "tool_call_id": "c1", "content": '{"sum": 4}'},
        ),
        ({"role": "ipython", "content": None}, {"role": "tool", "content": ""}),
        ({"role": "developer", "content": "Add."}, {"role": "system", "content": "Add."}),
        ({"from": "human", "value": "2+2?", "weight": None}, USER),
        ({"role": "user", "content": [{"type": "text", "text": "2+"}, {"text": "2?"}]}, USER),
        (
            {"role": "assistant", "content": "4", "thinking": "2 and 2", "tool_calls": None},
            {"role": "assistant", "content": "4"}
            | dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "2 and 2"),
        ),
    ],
)
def test_messages_of_all_formats(message, turn):
    """Templates read one format; people bring those of OpenAI, ShareGPT and TRL."""
    assert turns_of([message], "messages") == [(turn, True)]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "with a message that has no role"),
        ("x", "with a message that has no role"),
        ({"role": "user", "content": None}, "with a message of role user that has no content"),
        ({"role": "assistant"}, "with a message of role assistant that has no content"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:..."}}]},
            "with pictures or other parts that are no text",
        ),
        ({"role": "user", "content": "\ud800"}, "with half a character"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "{"}}]},
            "with a tool call that has no name or no JSON arguments",
        ),
        (
            {"from": "function_call", "value": "add(2, 2)"},
            "with a tool call that has no name or no JSON arguments",
        ),
    ],
)
def test_messages_that_cannot_be_trained(message, reason):
    """The reason is counted with the rows."""
    with pytest.raises(UnfitError, match=reason):
        turns_of([message], "messages")


def test_what_is_trained_of_a_chat():
    """The assistant's messages, but for those of weight 0, and none before the answer."""
    messages = [USER, {"role": "assistant", "content": "5", "weight": 0}, USER, answer("4")]
    turns = turns_of(messages, "messages")
    assert chat_of(turns) == Chat((USER, answer("5"), USER, answer("4")), (3,))
    assert chat_of([text_turn("user", "a"), *turns[1:]], start=2).trained == (3,)
    with pytest.raises(UnfitError, match="without an assistant's message to train"):
        chat_of(turns[:2])
    with pytest.raises(UnfitError, match="with an empty assistant's message"):
        chat_of(turns_of([USER, answer(" ")], "messages"))
    assert chat_of(turns_of([USER, CALLING], "messages")).trained == (1,)
    with pytest.raises(UnfitError, match="whose messages is no list"):
        turns_of("hello", "messages")
    with pytest.raises(UnfitError, match="without messages"):
        turns_of([], "messages")


def answer(content):
    return {"role": "assistant", "content": content}


def test_tools_of_all_formats():
    """Schemas are bare or wrapped, objects or JSON text."""
    bare = {"name": "add", "parameters": {}}
    wrapped = {"type": "function", "function": bare}
    for value in ([wrapped], [bare], wrapped, json.dumps([bare]), [json.dumps(wrapped)]):
        assert tools_of(value) == (wrapped,)
    assert tools_of(None) == tools_of("") == tools_of([]) == ()
    for wrong in ("add", [1], [{"type": "function"}]):
        with pytest.raises(UnfitError, match="whose tools are no list of functions"):
            tools_of(wrong)
