"""Conversations as documents, written by the tokenizer's chat template; the assistant's turns are learned.

A template may mark the assistant's words itself (`{% generation %}`). Otherwise the text is rendered without
and with each of the assistant's turns, and the difference is learned, including the end of the turn. A
template that rewrites earlier turns is refused.

A conversation that cannot be used ends the preparation with its file and line; those above `max_length` are
left out and counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from wlb_titan.arrays import Ints
from wlb_titan.corpus.sources import Source
from wlb_titan.corpus.tokenizer import TOKENIZER_FILE, Document, LeftOut, batched
from wlb_titan.errors import CorpusError

AT_ONCE = 256  # conversations tokenized together

ASSISTANT = "assistant"
THOUGHT = "reasoning_content"
Message = dict[str, Any]
Spans = list[tuple[int, int]]  # first learned character, and the one after the last


class ChatTemplate:
    """The chat template in a tokenizer's folder."""

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import PreTrainedTokenizerFast
            from transformers.utils.chat_template_utils import render_jinja_template
        except ImportError as error:
            install = 'install it with `pip install "wlb-titan[chat]"`'
            raise CorpusError(f"Chat templates are rendered by transformers; {install}.") from error
        named = PreTrainedTokenizerFast.from_pretrained(folder)
        if not named.chat_template:
            raise CorpusError(
                "The tokenizer has no chat template, so nothing says how a conversation is written. Take "
                "that of the model's chat version, or name a template in Jinja with --chat-template FILE."
            )
        self._template = named.get_chat_template()
        self._render = render_jinja_template
        self._special_tokens = named.special_tokens_map
        self.marked = bool(re.search(r"\{%-?\s*generation\s*-?%\}", self._template))
        self.tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder().values()
        self._special = [token.content for token in added if token.special]

    def document(self, source: Source, number: int) -> tuple[str, Spans]:
        """The text of a conversation, and its learned parts."""
        try:
            record = source.read(number)
            messages, tools = checked(record["messages"], self._special), record["tools"] or None
            check_spelling(tools, self._special, "a tool")
            text, spans = self.render(messages, tools)
            text.encode("utf-8")  # JSON can spell half a surrogate pair, which is no character
        except ValueError as error:
            raise CorpusError(f"{source.name(number)}: {error}.") from error
        return text, spans

    def render(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, Spans]:
        """Like `document`; a ValueError if the template refuses the messages, or drops or rewrites a turn."""
        text, spans = self._rendered(messages, tools, mask=self.marked)
        place = 0
        for number, message in enumerate(messages, start=1):
            for part in _texts(message):
                found = text.find(part.strip(), place)
                if found < 0:
                    raise ValueError(
                        f"the chat template drops message {number} ({message['role']}) or a part of it; use "
                        "one that writes every turn (--chat-template FILE)"
                    )
                place = found + len(part.strip())
        thought = messages[-1].get(THOUGHT)  # of earlier turns, templates drop it on purpose
        if isinstance(thought, str) and thought.strip() not in text:
            raise ValueError(
                f"the chat template drops the {THOUGHT} of message {len(messages)}; take it out, or use one "
                "that writes it (--chat-template FILE)"
            )
        if self.marked:
            return text, spans
        return text, [
            self._turn(messages, number, tools, text)
            for number, message in enumerate(messages)
            if message["role"] == ASSISTANT
        ]

    def _turn(self, messages: list[Message], number: int, tools: Any, text: str) -> tuple[int, int]:
        before, _ = self._rendered(messages[:number], tools, prompt=True)
        after, _ = self._rendered(messages[: number + 1], tools)
        if not (after.startswith(before) and text.startswith(after)):
            raise ValueError(
                f"the chat template writes message {number + 1} ({ASSISTANT}) otherwise once more turns "
                "follow. Put {% generation %} and {% endgeneration %} around what the assistant says in it, "
                "and name it with --chat-template FILE"
            )
        return len(before), len(after)

    def _rendered(
        self, messages: list[Message], tools: Any, *, prompt: bool = False, mask: bool = False
    ) -> tuple[str, Spans]:
        try:
            texts, spans = self._render(
                conversations=[messages],
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=mask,
                **self._special_tokens,
            )
        except Exception as error:  # templates raise what they like
            raise ValueError(f"the chat template refuses it: {error}") from error
        return texts[0], [(begin, end) for begin, end in spans[0]] if mask else []


def conversations(
    source: Source, order: Ints, template: ChatTemplate, left_out: LeftOut, longest: int | None
) -> Iterator[Document]:
    """Like `tokenized`, without conversations of more than `longest` tokens."""
    for batch in batched(enumerate(order), lambda place: 1, AT_ONCE):
        rendered = [template.document(source, document) for _, document in batch]
        texts = [text for text, _ in rendered]
        encodings = template.tokenizer.encode_batch(texts, add_special_tokens=False)
        for (position, document), (_, spans), encoding in zip(batch, rendered, encodings, strict=True):
            if longest is not None and len(encoding) > longest:
                left_out.long += 1
                continue
            tokens = np.array(encoding.ids, dtype=np.int32)
            learned = _learned(encoding.offsets, spans)
            yield Document(position, source.name(document), tokens, learned.astype(np.int8))


def checked(messages: Any, special: list[str]) -> list[Message]:
    """The messages without empty keys; a ValueError if they are malformed or none can be learned."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('the conversation is no list of messages, {"role": ..., "content": ...}')
    result = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            there = f"it has {', '.join(message)}; " if isinstance(message, dict) else ""
            raise ValueError(f'message {number} has no "role"; {there}write {{"role": ..., "content": ...}}')
        message = {key: value for key, value in message.items() if value is not None}
        name = f"message {number} ({message['role']})"
        if not any(text.strip() for text in _texts(message)) and not message.get("tool_calls"):
            raise ValueError(f"{name} has no text")
        check_spelling(message, special, name)
        result.append(message)
    if all(message["role"] != ASSISTANT for message in result):
        raise ValueError(f'no message is of the role "{ASSISTANT}", so nothing would be learned')
    return result


def check_spelling(value: Any, special: list[str], what: str) -> None:
    """A ValueError if any text in a JSON value spells a special token."""
    texts = "\n".join(_strings(value))
    if spelt := [token for token in special if token in texts]:
        raise ValueError(f"{what} spells the special token {spelt[0]!r}; only the template may write it")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _texts(message: Message) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _learned(offsets: list[tuple[int, int]], spans: Spans) -> np.ndarray:
    """bool (tokens,), whether any of a token's characters lies in a span."""
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    learned = np.zeros(len(begins), dtype=np.bool_)
    for begin, end in spans:
        learned |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
    return learned
