"""Brings chats of several formats into the one that chat templates take. Pure.

    OpenAI, TRL     role, content, tool_calls; also function_call and the role function
    ShareGPT        from (human, gpt, function_call, observation, ...), value

A message becomes a dict with role (system, user, assistant or tool), content, and perhaps
tool_calls, reasoning_content, name and tool_call_id; other keys stay as they are. Arguments of
calls are dicts, also where a file has them as JSON text. Keys without a value are left out.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

Turn = dict[str, Any]

_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "model": "assistant", "function_call": "assistant", "developer": "system", "function": "tool",
    "function_response": "tool", "observation": "tool", "ipython": "tool",
}  # fmt: skip
_REASONING = ("reasoning_content", "reasoning", "thinking")
_READ = frozenset({"role", "from", "content", "value", "weight", "tool_calls", "function_call"})
"""Keys that are not copied as they are."""


class UnfitError(Exception):
    """A row cannot be used. Its text is the reason, as after "4 rows": "without text"."""


@attrs.frozen(slots=True)
class Chat:
    """Messages, the numbers of those that are trained, and the tools that they may call."""

    turns: tuple[Turn, ...]
    trained: tuple[int, ...]
    tools: tuple[Turn, ...] = ()


Weighed = Sequence[tuple[Turn, bool]]
"""Messages, and whether each may be trained."""


def chat_of(turns: Weighed, tools: tuple[Turn, ...] = (), *, start: int = 0) -> Chat:
    """Make a chat whose assistant's messages from `start` on are trained.

    Raises UnfitError where there is none, or where one is empty.
    """
    trained = tuple(
        number
        for number, (turn, counts) in enumerate(turns)
        if counts and number >= start and turn["role"] == "assistant"
    )
    if not trained:
        raise UnfitError("without an assistant's message to train")
    for number in trained:
        turn = turns[number][0]
        if not any(
            str(turn.get(key, "")).strip() for key in ("content", "tool_calls", *_REASONING)
        ):
            raise UnfitError("with an empty assistant's message")
    return Chat(tuple(turn for turn, _ in turns), trained, tools)


def turns_of(value: Any, column: str) -> Weighed:
    """Read a list of messages, or its JSON text. Raises UnfitError."""
    value = _parsed(value)
    if not value:
        raise UnfitError(f"without {column}")
    if not isinstance(value, list):
        raise UnfitError(f"whose {column} is no list of messages")
    return [_turn(each) for each in value]


def text_turn(role: str, content: str) -> tuple[Turn, bool]:
    """Make a message of text, which may be trained."""
    return {"role": role, "content": content}, True


def tools_of(value: Any) -> tuple[Turn, ...]:
    """Read the tools of a row: function schemas, bare or wrapped, or their JSON text.

    Raises UnfitError.
    """
    value = _parsed(value)
    found = []
    for each in [value] if isinstance(value, Mapping) else value or ():
        tool = _parsed(each)
        if not isinstance(tool, Mapping) or not (tool.get("function") or tool.get("name")):
            raise UnfitError("whose tools are no list of functions")
        found.append(
            dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}
        )
    return tuple(found)


def _parsed(value: Any) -> Any:
    """Parse JSON text; return anything else unchanged."""
    if isinstance(value, str):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _turn(value: Any) -> tuple[Turn, bool]:
    given = value if isinstance(value, Mapping) else {}
    named = given.get("role", given.get("from"))
    if not isinstance(named, str):
        raise UnfitError("with a message that has no role")
    role, content = _ROLES.get(named, named), given.get("content", given.get("value"))
    turn: Turn = {"role": role}
    calls = given.get("tool_calls") or given.get("function_call")
    if named == "function_call":
        calls, content = content, None
    if calls:
        calls = _parsed(calls)
        turn["tool_calls"] = [
            _call(each) for each in (calls if isinstance(calls, list) else [calls])
        ]
    reasoning = next((given[key] for key in _REASONING if given.get(key)), None)
    if isinstance(reasoning, str):
        # Templates read it under several names.
        turn |= dict.fromkeys(_REASONING, reasoning)
    text = _content(content, role)
    if text is not None:
        turn["content"] = text
    elif not (calls or reasoning):
        raise UnfitError(f"with a message of role {role[:40]} that has no content")
    rest = {key: one for key, one in given.items() if key not in _READ and one is not None}
    turn = rest | turn
    try:
        json.dumps(turn, ensure_ascii=False, default=str).encode()
    except (UnicodeEncodeError, ValueError, RecursionError):
        # JSON can hold half a character, like \ud800, which no tokenizer takes.
        raise UnfitError("with half a character") from None
    return turn, given.get("weight") not in (0, "0")


def _content(value: Any, role: str) -> str | None:
    """Return the text of a content. A tool's may be any JSON; others are text or parts of text."""
    if isinstance(value, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in value
    ):
        return "".join(part["text"] for part in value)
    if role == "tool" and not isinstance(value, str):
        return "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    if value is None or isinstance(value, str):
        return value
    raise UnfitError("with pictures or other parts that are no text")


def _call(value: Any) -> Turn:
    """Normalize a call of a tool. Raises UnfitError."""
    call = _parsed(value)
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        arguments = function.get("arguments", function.get("parameters"))
        arguments = _parsed(arguments) or {}
        if isinstance(arguments, Mapping):
            named = {"name": function["name"], "arguments": dict(arguments)}
            number = {"id": call["id"]} if call.get("id") else {}
            return {**number, "type": "function", "function": named}
    raise UnfitError("with a tool call that has no name or no JSON arguments")
