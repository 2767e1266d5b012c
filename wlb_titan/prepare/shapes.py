"""Records of conversations that are no lists of messages, as messages: ShareGPT's, TRL's and Alpaca's."""

from __future__ import annotations

from collections.abc import Callable, Container
from textwrap import shorten
from typing import Any


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
