"""Rows of a chat: turns of OpenAI's `messages` or ShareGPT's `conversations`, also with tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from zerotrain.artifact.documents import DocumentError, LeftOut, Names, parse_json
from zerotrain.data.conversation import ROLES, SYSTEM, TOOLS, Message
from zerotrain.data.table import IRRELEVANT, is_absent

Row = Mapping[Any, Any]
COLUMNS = ("messages", "conversations")
SHAREGPT = {
    "human": "user",
    "gpt": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}
"""Names of roles in ShareGPT's rows, whose turns have `from` and `value`."""
REASONING = "reasoning_content"
"""What a model thinks before its answer, as most chat templates name it."""
REASONING_NAMES = (REASONING, "reasoning", "thinking")
IRRELEVANT_IN_TURN = {
    **IRRELEVANT,
    "name": "it tells speakers of one role apart, and chat templates know roles alone",
}


class BadRowError(Exception):
    """A row that cannot be used; the text gives the reason."""


def read_chat(row: Row, left_out: LeftOut) -> list[Message]:
    """Parse the turns in order; the last one must be an answer, and a question must come first.

    Args:
        row: The row.
        left_out: Counts the keys that are not used.

    Raises:
        BadRowError: the row is no such conversation.
    """
    column = next((column for column in COLUMNS if not is_blank(row.get(column))), COLUMNS[0])
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise BadRowError(f"{column} is no list of turns")
    names = Names(name for name in row if not is_blank(row[name]))
    names.use(column, "system", TOOLS)
    names.ignore(IRRELEVANT)
    left_out.add("row", names.leftovers())
    messages = [_turn(number, turn, left_out) for number, turn in enumerate(turns, 1)]
    messages = [*_system(row, messages), *messages]
    _check_order(messages)
    return [*_tools(row), *messages]


def is_blank(found: Any) -> bool:
    """Return whether a value is absent, or a text, a list or an object without content."""
    if isinstance(found, str):
        return not found.strip()
    return is_absent(found) or (isinstance(found, list | dict) and not found)


def _check_order(messages: list[Message]) -> None:
    if messages[-1].role != "assistant":
        raise BadRowError(f"its last turn is the {messages[-1].role}'s, not an answer")
    first = next(message.role for message in messages if message.role not in SYSTEM)
    if first != "user":
        came = "an answer" if first == "assistant" else "a tool's result"
        raise BadRowError(f"{came} comes first, before any question")
    if not any(message.learned for message in messages if message.role == "assistant"):
        raise BadRowError("no answer is learned: all have weight: 0 or train: false")


def _system(row: Row, messages: list[Message]) -> list[Message]:
    """Return the turn of a system text next to the turns, unless the first turn repeats it."""
    text = row.get("system")
    if is_blank(text):
        return []
    if not isinstance(text, str):
        raise BadRowError(f"system is {type(text).__name__}, not text")
    if messages[0].role not in SYSTEM:
        return [Message("system", text)]
    if messages[0].content.strip() == text.strip():
        return []
    raise BadRowError(
        f"system and turn 1, which is the {messages[0].role}'s, differ; keep one of them"
    )


def _turn(number: int, turn: Any, left_out: LeftOut) -> Message:
    if not isinstance(turn, dict):
        raise BadRowError(f"turn {number} is {type(turn).__name__}, not an object")
    names = Names(name for name in turn if not is_blank(turn[name]))
    named = turn["role"] if not is_absent(turn.get("role")) else turn.get("from")
    names.use("role" if not is_absent(turn.get("role")) else "from")
    role = SHAREGPT.get(named, named) if isinstance(named, str) else named
    if role not in ROLES:
        raise BadRowError(f"turn {number} has the role {named!r}, none of {', '.join(ROLES)}")
    column = "content" if not is_blank(turn.get("content")) else "value"
    names.use(column, "weight", "train")
    content = _content(number, turn.get(column), left_out)
    keys: dict[str, Any] = {}
    if role == "assistant":
        names.use(*REASONING_NAMES, "tool_calls")
        if thought := _reasoning(number, turn):
            keys[REASONING] = thought
        calls, where = turn.get("tool_calls"), f"tool_calls of turn {number}"
        if named == "function_call":
            if not is_blank(calls):
                raise BadRowError(f"turn {number} has calls both in its {column} and in tool_calls")
            calls, content, where = content, "", f"the {column} of turn {number}"
        if not is_blank(calls):
            keys["tool_calls"] = _calls(calls, where, left_out)
    if role == "tool":
        names.use("name", "tool_call_id")
        keys = {
            name: turn[name] for name in ("name", "tool_call_id") if not is_blank(turn.get(name))
        }
    if not content and not keys.get("tool_calls"):
        raise BadRowError(f"turn {number} has no content")
    names.ignore(IRRELEVANT_IN_TURN)
    left_out.add("turn", names.leftovers())
    return Message(role, content, _json(keys, f"turn {number}"), _learned(number, turn, role))


def _content(number: int, found: Any, left_out: LeftOut) -> str:
    """Return a turn's text, joined if it is in parts; empty for a turn without one."""
    if is_blank(found):
        return ""
    if isinstance(found, str):
        return found
    if not isinstance(found, list):
        raise BadRowError(f"the content of turn {number} is {type(found).__name__}, not text")
    texts = []
    for part in found:
        if isinstance(part, dict) and part.get("type") not in (None, "text"):
            raise BadRowError(
                f"turn {number} has a part of the type {part['type']!r}; only text is read"
            )
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise BadRowError(f"turn {number} has a part without text")
        names = Names(name for name in part if not is_blank(part[name]))
        names.use("type", "text")
        left_out.add("part of a turn", names.leftovers())
        texts.append(part["text"])
    text = "".join(texts)
    return "" if is_blank(text) else text


def _reasoning(number: int, turn: Row) -> str | None:
    names = [name for name in REASONING_NAMES if not is_blank(turn.get(name))]
    found = [turn[name] for name in names]
    for text in found:
        if not isinstance(text, str):
            raise BadRowError(f"{REASONING} of turn {number} is {type(text).__name__}, not text")
    if len({*found}) > 1:
        raise BadRowError(f"{' and '.join(names)} of turn {number} differ; keep one of them")
    return found[0] if found else None


def _learned(number: int, turn: Row, role: str) -> bool:
    """Return whether a turn is learned by its `weight` or `train`; answers are by default."""
    found = {}
    for name in ("weight", "train"):
        value = turn.get(name)
        if is_absent(value):
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRowError(
                f"turn {number} has {name}: {value!r}; only 0 and false (not learned), 1 and true "
                "are read"
            )
        found[name] = bool(value)
    if len({*found.values()}) > 1:
        raise BadRowError(f"weight and train of turn {number} contradict each other")
    if role != "assistant" and any(found.values()):
        name = next(iter(found))
        raise BadRowError(
            f"turn {number} is the {role}'s and has {name}: {turn[name]!r}; answers alone are "
            "learned"
        )
    return all(found.values())


def _tools(row: Row) -> list[Message]:
    """Return the message of a row's tools, each as transformers documents it."""
    found = _parsed(row.get(TOOLS), TOOLS)
    if is_blank(found):
        return []
    if not isinstance(found, list):
        raise BadRowError(f"{TOOLS} is {type(found).__name__}, not a list")
    tools = []
    for number, tool in enumerate(found, 1):
        function = _function(tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRowError(f"tool {number} has no name of a function")
        if function is tool:
            outer = ("type", "function")
            function = {name: value for name, value in tool.items() if name not in outer}
            tool = {"function": function}
        tools.append(tool if "type" in tool else {"type": "function", **tool})
    return [Message(TOOLS, _json(tools, TOOLS))]


def _calls(found: Any, where: str, left_out: LeftOut) -> list[dict[str, Any]]:
    """Return calls of tools, each as transformers documents it; a single one is a list of one."""
    found = _parsed(found, where)
    calls = []
    for call in found if isinstance(found, list) else [found]:
        function = _function(call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRowError(f"{where}: a call has no name of a function")
        given = _parsed(function.get("arguments"), f"{where}: arguments of {function['name']}")
        if not isinstance(given := {} if is_blank(given) else given, dict):
            raise BadRowError(
                f"{where}: arguments of {function['name']} are {type(given).__name__}, not names "
                "with values"
            )
        inner = Names(name for name in function if not is_blank(function[name]))
        inner.use("name", "arguments", "id", "type")
        outer = Names(name for name in call if function is not call and not is_blank(call[name]))
        outer.use("function", "id", "type", *IRRELEVANT)
        left_out.add("call", [*outer.leftovers(), *inner.leftovers()])
        own = {"id": call["id"]} if not is_blank(call.get("id")) else {}
        calls.append(
            {
                **own,
                "type": "function",
                "function": {"name": function["name"], "arguments": given},
            }
        )
    return calls


def _function(found: Any) -> Any:
    """Return what a tool or a call has under `function`, or all of one without that level."""
    if not isinstance(found, dict) or is_absent(found.get("function")):
        return found
    return found["function"]


def _parsed(found: Any, where: str) -> Any:
    """Parse a value that may be JSON in a text."""
    if not isinstance(found, str) or is_blank(found):
        return found
    try:
        return parse_json(found, where)
    except DocumentError as error:
        raise BadRowError(f"{where}: {error.why}") from error


def _json(found: Any, where: str) -> str:
    """Write values of a row as JSON that another process can read; nothing for no values."""
    if not found:
        return ""
    try:
        text = json.dumps(found, ensure_ascii=False, allow_nan=False)
        parse_json(text, where)
    except DocumentError as error:
        raise BadRowError(f"{where}: {error.why}") from error
    except (TypeError, ValueError) as error:
        raise BadRowError(f"{where}: {error}") from error
    return text
