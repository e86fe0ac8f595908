"""Renders chats by a tokenizer's chat template, and finds what the assistant writes in them.

Where a template marks it ({% generation %}), the tokenizer's own mask counts. Where it does not,
a turn begins where the chat before it, with the prompt for an answer, ends, and ends where the
chat up to it ends.

Templates may write a turn differently once others follow (without its reasoning, say). Such a
turn is trained in a text of its own, of the chat up to it: as the model will meet it.

Templates also leave out what they were not written for, such as calls of tools. A chat of which
calls, tools, or messages do not appear in the text is refused.

`turns_of` brings chats of several formats into the one that chat templates take:

    OpenAI, TRL     role, content, tool_calls; also function_call and the role function
    ShareGPT        from (human, gpt, function_call, observation, ...), value

A message becomes a dict with role (system, user, assistant or tool), content, and perhaps
tool_calls, reasoning_content, name and tool_call_id; other keys stay as they are. Arguments of
calls are dicts, also where a file has them as JSON text. Keys without a value are left out.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import attrs

from fsl_async.errors import one_line

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


_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
Span = tuple[int, int]
Render = Callable[..., str]


@attrs.frozen(slots=True)
class Rendered:
    """A text, and where it is trained, in characters."""

    text: str
    spans: tuple[Span, ...]

    def cut(self) -> list[tuple[str, bool]]:
        """Cut the text into parts: (text, whether it is trained)."""
        parts, at = [], 0
        for start, stop in self.spans:
            parts += [(self.text[at:start], False), (self.text[start:stop], True)]
            at = stop
        return [part for part in (*parts, (self.text[at:], False)) if part[0]]


def render(
    chat: Chat, tokenizer: Any, *, whole: bool = False, once: bool = False
) -> list[Rendered]:
    """Render a chat: the texts that together train each trained turn once.

    whole: train all of the text. once: raise where one text is not enough.
    Raises UnfitError. The first turn is trained by marks only: it has no prompt in front.
    """
    refused = []
    for turns in _variants(chat.turns):
        try:
            return _rendered(attrs.evolve(chat, turns=turns), tokenizer, whole=whole, once=once)
        except UnfitError as error:
            refused.append(error)
    # What a text lacks is a better reason than the error of another variant.
    raise min(refused, key=lambda error: str(error).startswith(_RAISED))


_RAISED = "refused by the chat template"


def _variants(turns: tuple[Turn, ...]) -> Iterator[tuple[Turn, ...]]:
    """Yield the turns, then variants that some templates need.

    These have no missing contents, arguments as JSON text, or contents in parts.
    """
    yield turns
    if any("tool_calls" in turn or "content" not in turn for turn in turns):
        yield tuple({"content": "", **turn} for turn in turns)
        spelled = tuple(_with_text_arguments(turn) for turn in turns)
        yield spelled
        yield tuple({"content": "", **turn} for turn in spelled)
    parts = ([{"type": "text", "text": turn.get("content", "")}] for turn in turns)
    yield tuple({**turn, "content": part} for turn, part in zip(turns, parts, strict=True))


def _with_text_arguments(turn: Turn) -> Turn:
    calls = []
    for call in turn.get("tool_calls", ()):
        text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": text}})
    return {**turn, "tool_calls": calls} if calls else turn


def _rendered(chat: Chat, tokenizer: Any, *, whole: bool, once: bool) -> list[Rendered]:
    turns, tools = list(chat.turns), list(chat.tools) or None

    @cache
    def text_of(count: int, *, asks: bool = False) -> str:
        try:
            text: str = tokenizer.apply_chat_template(
                turns[:count], tools=tools, tokenize=False, add_generation_prompt=asks
            )
        except Exception as error:  # noqa: BLE001 - templates raise as they like
            raise UnfitError(f"{_RAISED} ({_reason(error)})") from None
        return text

    if whole:
        text = text_of(len(turns))
        _check(chat, text, len(turns), dict.fromkeys(chat.trained, text))
        return [Rendered(text, ((0, len(text)),))]
    text = text_of(len(turns))
    spans = _marked_spans(chat, tokenizer, text)
    if spans:
        trained = "".join(text[start:stop] for start, stop in spans)
        with suppress(UnfitError):  # earlier turns may lack their reasoning
            _check(chat, text, len(turns), dict.fromkeys(chat.trained, trained))
            return [Rendered(text, spans)]
    return _by_prefixes(chat, text_of, tokenizer.eos_token or "", once=once)


def _by_prefixes(chat: Chat, text_of: Render, end: str, *, once: bool) -> list[Rendered]:
    rest = [number for number in chat.trained if number]
    if not rest:
        raise UnfitError("whose only trained message has no prompt")
    found = []
    while rest:
        count = rest[-1] + 1
        text = text_of(count)
        spans = {number: _span(text, number, text_of, end) for number in rest}
        known = {number: span for number, span in spans.items() if span is not None}
        rest = [number for number in rest if number not in known]
        if count - 1 not in known or (once and rest):
            raise UnfitError("whose turns the chat template rewrites")
        try:
            _check(chat, text, count, {n: text[start:stop] for n, (start, stop) in known.items()})
        except UnfitError:
            # The prompt for an answer may hold how it begins, such as <think>.
            wider = {n: text[len(text_of(n)) : stop] for n, (_, stop) in known.items()}
            _check(chat, text, count, wider)
        found.append(Rendered(text, tuple(known.values())))
    return found[::-1]


def _span(text: str, number: int, text_of: Render, end: str) -> Span | None:
    """Find a turn in a text; None where the text has it in other words."""
    after = text_of(number + 1)
    if not text.startswith(after):
        after = after.removesuffix(end)  # some templates end a whole chat by it
    before = text_of(number, asks=True)
    start = len(before)
    if not after.startswith(before):
        # The prompt for an answer opens something that the turn does not have, such as a thought.
        pairs = zip(before, f"{after}\0", strict=False)
        start = next(place for place, (one, other) in enumerate(pairs) if one != other)
        if start < len(text_of(number)):
            return None
        mark = after.rfind("<", len(text_of(number)), start)
        if ">" not in after[mark:start] and mark >= 0:
            start = mark  # both open one with this sign: <think> here, <tool_call> there
    return (start, len(after)) if text.startswith(after) and start < len(after) else None


def _marked_spans(chat: Chat, tokenizer: Any, text: str) -> tuple[Span, ...]:
    """Return the spans that the template marks, or none where other turns are trained."""
    answers = tuple(n for n, turn in enumerate(chat.turns) if turn["role"] == "assistant")
    tools = list(chat.tools) or None
    if chat.trained != answers or not getattr(tokenizer, "is_fast", False):
        return ()
    if not _MARKED.search(tokenizer.get_chat_template(None, tools)):
        return ()
    masked = tokenizer.apply_chat_template(
        list(chat.turns), tools=tools, tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True, tokenizer_kwargs={"verbose": False},
    )  # fmt: skip
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    spans: list[Span] = []
    pairs = zip(offsets["offset_mapping"], masked["assistant_masks"], strict=True)
    for start, stop in (offset for offset, trained in pairs if trained):
        if spans and start <= spans[-1][1]:
            spans[-1] = spans[-1][0], stop
        else:
            spans.append((start, stop))
    return tuple(spans)


def _reason(error: Exception) -> str:
    return one_line(str(error))[:120] or type(error).__name__


def _check(chat: Chat, text: str, count: int, trained: Mapping[int, str]) -> None:
    """Raise UnfitError where the first `count` turns are not all in the text.

    trained: by number of a turn the part of the text that has it. Turns of the assistant that are
    not trained may be missing: templates shorten them. Space does not count.
    """
    squeezed = _squeezed(text)
    for tool in chat.tools:
        if not _appears(tool.get("function", tool).get("name", ""), squeezed):
            raise UnfitError("whose tools the chat template leaves out")
    for number, turn in enumerate(chat.turns[:count]):
        is_answer = turn["role"] == "assistant"
        if is_answer and number not in trained:
            continue
        here = _squeezed(trained[number]) if is_answer else squeezed
        for call in turn.get("tool_calls", ()):
            if not all(_appears(leaf, here) for leaf in _leaves(call["function"])):
                raise UnfitError("whose tool calls the chat template leaves out")
        if is_answer and not _appears(turn.get("reasoning_content", ""), here):
            raise UnfitError("whose reasoning the chat template leaves out")
        content = turn.get("content", "")
        parts = content if isinstance(content, list) else [{"text": content}]
        if not all(_appears(part["text"], here) for part in parts):
            role = turn["role"][:40]
            raise UnfitError(f"of which the chat template leaves out a message of role {role}")


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, Sequence) or isinstance(value, str):
        yield value
        return
    for each in value:
        yield from _leaves(each)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _appears(value: Any, squeezed: str) -> bool:
    """Whether a text has a value, plain, as JSON, or as Python writes it."""
    forms = [
        str(value),
        json.dumps(value, default=str),
        json.dumps(value, ensure_ascii=False, default=str),
    ]
    if isinstance(value, str):
        forms = [forms[0], *(form[1:-1] for form in forms[1:])]
    return any(_squeezed(form) in squeezed for form in forms)
