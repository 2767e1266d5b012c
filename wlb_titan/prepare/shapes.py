"""What a record holds: a text, or a conversation as messages or in ShareGPT's, TRL's or Alpaca's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable
from datetime import date
from numbers import Number
from textwrap import shorten
from typing import Any

from wlb_titan.corpus.formats import SWITCH

HARMLESS = re.compile(
    "(^|_)((uu)?id|hash|source|dataset|subset|split|category|language|url|model|date|type)$"
)
"""Keys beside a conversation whose text, if it is one line of at most 200 characters, is no part of it."""

FRAME = 100  # characters around each message of a text that repeats the conversation


def text_of(record: Any, field: str) -> str:
    """The text of a record; a ValueError if the field is missing or not text."""
    value = _field_of(record, field)
    text = "" if value is None else value
    if not isinstance(text, str):
        chat = "; if these are conversations, add --chat" if isinstance(text, list) else ""
        raise ValueError(f"the field {field!r} holds {type(text).__name__}, not text{chat}")
    text.encode("utf-8")  # JSON can spell half a surrogate pair, which is no character
    return text


def conversation(record: Any, field: str) -> dict[str, Any]:
    """A record's messages, and the `tools` they may call, or None; a ValueError without messages, or with
    another key whose value may belong to the conversation."""
    shape = shape_of(record, field) if isinstance(record, dict) else None
    messages = shape(record) if shape else _field_of(record, field)
    tools = record.pop("tools", None)
    for key, value in record.items():  # which were not taken out
        if not _harmless(key, value, messages):
            raise ValueError(
                f"the record has a key {key!r}, which is not read; remove it, or put it into the messages"
            )
    return {"messages": messages, "tools": json.loads(tools or "null") if isinstance(tools, str) else tools}


def _harmless(key: str, value: Any, messages: Any) -> bool:
    """Whether nothing of a conversation is lost with a value beside it."""
    if isinstance(value, str):
        said = (
            [m.get("content") for m in messages if isinstance(m, dict)] if isinstance(messages, list) else []
        )
        short = len(value) <= 200 and "\n" not in value and HARMLESS.search(key)
        return bool(not value or short or value in said or _repeats(value, said))
    if isinstance(value, Number | date):
        return value == 1 or not SWITCH.search(key)
    return not value


def _repeats(text: str, said: list[Any]) -> bool:
    """Whether a text is the conversation written out, as Alpaca's `text` is: all lines of the messages are
    lines of it, in their order, and there is little else."""
    written, lines = (
        [line.strip() for part in parts for line in str(part).splitlines() if line.strip()]
        for parts in ([text], said)
    )
    rest = iter(written)
    repeated = bool(lines) and all(line in rest for line in lines)
    return repeated and sum(map(len, written)) - sum(map(len, lines)) <= FRAME * (1 + len(said))


def _field_of(record: Any, field: str) -> Any:
    """A field, taken out of the record."""
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    if field not in record:
        raise ValueError(f"no field {field!r}; it has {', '.join(record)}{advice(field, record)}")
    return record.pop(field)


def advice(field: str, fields: Iterable[str]) -> str:
    """What to do if a record with `fields` lacks `field`."""
    chat = "; for conversations add --chat" if field == "text" and "messages" in fields else ""
    return f"{chat}; another field is named after a #, as in --source jsonl:FILE#FIELD"


def shape_of(columns: Container[str], field: str) -> Callable[[dict[str, Any]], list[dict[str, Any]]] | None:
    """What makes messages of a record with other columns than `field`, if their names are known; it takes
    out of the record what it reads."""
    if field in columns or field != MESSAGES:
        return None
    return next((shape for names, shape in SHAPES.items() if all(name in columns for name in names)), None)


def _share_gpt(record: dict[str, Any]) -> list[dict[str, Any]]:
    turns, messages = record.pop("conversations"), []
    for turn in turns if isinstance(turns, list) else [turns]:
        if not isinstance(turn, dict) or turn.keys() - {"weight"} != {"from", "value"}:
            raise ValueError(
                f"a turn of 'conversations' has 'from' and 'value', not {shorten(repr(turn), 80)}"
            )
        if turn["from"] not in SPEAKERS:
            raise ValueError(f"'from' is {turn['from']!r}, which is none of {', '.join(SPEAKERS)}")
        content = {"role": SPEAKERS[turn["from"]], "content": turn["value"]}
        messages.append(content | {key: turn[key] for key in ("weight",) if key in turn})
    return messages


def _completed(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Texts of a user and an assistant, or lists of messages, of which only the completion is learned."""
    prompt, completion = record.pop("prompt"), record.pop("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [{**message, "weight": 0} for message in prompt] + completion
    return _asked(prompt, completion)


def _instructed(record: dict[str, Any]) -> list[dict[str, Any]]:
    parts = (record.pop("instruction"), record.pop("input", None))
    return _asked("\n\n".join(filter(None, parts)), record.pop("output"))


def _asked(question: Any, answer: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


MESSAGES = "messages"  # the field of conversations
SHAPES = {
    ("conversations",): _share_gpt,
    ("prompt", "completion"): _completed,
    ("instruction", "output"): _instructed,
}
"""Columns of conversations that are no lists of messages: ShareGPT's, TRL's and Alpaca's."""

SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
    "system": "system",
}
"""Roles by ShareGPT's `from`."""
