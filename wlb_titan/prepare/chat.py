"""Conversations as documents, written by the tokenizer's chat template; the assistant's turns are learned.

docs/sft.md has the rules. Without marks of the template (`{% generation %}`) the text is rendered without
and with each of the assistant's turns, and the difference is learned. All is rendered once more with a mark
inside each text, and every mark must come out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from typing import Any

import numpy as np

from wlb_titan.arrays import Ints
from wlb_titan.corpus.formats import SWITCH
from wlb_titan.errors import CorpusError, refusing
from wlb_titan.prepare.sources import Source
from wlb_titan.prepare.tokenizer import CorpusTokenizer, Document, LeftOut, batched

AT_ONCE = 256  # conversations tokenized together

ASSISTANT = "assistant"
CONTEXT = "system developer user tool function ipython environment observation tool_response"
ROLES = (ASSISTANT, *CONTEXT.split())  # templates write any other, also one that stands for the assistant

FOLLOWED = ("weight", "train", "training", "trainable", "loss", "loss_weight", "mask")
"""Keys by which a message says whether it is learned, 1 or 0."""

THOUGHT = re.compile("reason|think|thought")  # keys; templates drop those of earlier turns on purpose
END_OF_THOUGHT = "</think>"  # where thoughts are a part of the content
IDENTIFIER = re.compile("(^|_)(id|type)$")  # keys that templates need not write
DATE = re.compile(r"""strftime_now\((['"])(.*?)\1\)""")  # where templates ask for it
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MARK = re.compile(r"wqzx(\d+)xzqw", re.IGNORECASE)

Message = dict[str, Any]
Place = tuple[Any, ...]  # of a text, as ("messages", 2, "tool_calls", 0, "function", "name")
Spans = list[tuple[int, int]]  # first learned character, and the one after the last


class ChatTemplate:
    """The chat template of a tokenizer, or the two of which one is for records with tools, on `today`."""

    def __init__(self, tokenizer: CorpusTokenizer, today: str | None = None) -> None:
        from transformers.utils.chat_template_utils import render_jinja_template

        self._named, self._day = tokenizer.named, None
        if not self._named.chat_template:
            raise CorpusError(
                f"The tokenizer {tokenizer.folder} has no chat template. Take that of the model's chat "
                "version, or name a template in Jinja with --chat-template FILE."
            )
        if today:
            with refusing(lambda reason: CorpusError(f"--today: {reason}.")):
                self._day = date.fromisoformat(today)
        self._render = render_jinja_template
        self.tokenizer = tokenizer
        added = self._named.added_tokens_decoder.values()
        self._special = [token.content for token in added if token.special]
        self._thoughts: set[Place] = set()  # kinds that the template writes in a last turn
        self.parts = self.endless = 0  # learned parts, and those that end with no special token

    def document(self, source: Source, number: int) -> tuple[str, Spans]:
        """The text of a conversation, and its learned parts."""
        try:
            record = source.read(number)
            messages, tools = checked(record["messages"], self._special), record["tools"] or None
            check_spelling(tools, self._special, "a tool")
            text, spans = self.render(messages, tools)
            text.encode("utf-8")  # JSON can spell half a surrogate pair, which is no character
            parts = [part.rstrip() for begin, end in spans if (part := text[begin:end])]
            self.parts += len(parts)
            self.endless += sum(not part.endswith(tuple(self._special)) for part in parts)
        except ValueError as error:
            raise CorpusError(f"{source.name(number)}: {error}.") from error
        return text, spans

    def render(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, Spans]:
        """Like `document`; a ValueError if the template refuses the messages, or drops or rewrites a turn."""
        try:
            return self._written(messages, tools)
        except ValueError:
            joined = [{**m, "content": "".join(_texts(m))} if "content" in m else m for m in messages]
            if joined == messages:
                raise
            return self._written(joined, tools)  # of a template that knows no parts

    def _written(self, messages: list[Message], tools: list[Any] | None) -> tuple[str, Spans]:
        text, spans = self._rendered(messages, tools, mask=True)
        marked = Marked(messages, tools)
        shown, parts = self._shown(marked)
        alike = MARK.sub("", shown) == text  # else a mark changes more than its own text
        present = {int(number) for number in MARK.findall(shown)} if alike else set()
        for number, place in marked.places.items():
            if number not in present and not self._writes(messages, tools, number, place):
                raise ValueError(
                    f"the chat template drops {_named(place, messages)} or a part of it; take it out, or use "
                    "a template that writes it (--chat-template FILE)"
                )
        _check_form(marked, messages, shown)
        learned = [all(message.get(key, 1) for key in FOLLOWED) for message in messages]
        if not GENERATION.search(self._template(tools)):
            return text, [
                self._turn(messages, number, tools, text)
                for number, message in enumerate(messages)
                if message["role"] == ASSISTANT and learned[number]
            ]
        if not all(learned) and not alike:
            raise ValueError("the chat template does not keep messages apart, so none can be left unlearned")
        kept, turn = [], 0
        for span, (begin, end) in zip(spans, parts, strict=alike):
            mark = MARK.search(shown, begin, end)
            turn = marked.places[int(mark[1])][1] if mark else turn
            kept += [span] * learned[turn]
        return text, kept if alike else spans

    def _writes(self, messages: list[Message], tools: list[Any] | None, number: int, place: Place) -> bool:
        """Whether the template writes mark `number`, or drops it as a thought of an earlier turn."""
        shown, _ = self._shown(Marked(messages, tools, only=number))
        if not shown or MARK.search(shown):  # refused because of the mark: it is read
            return True
        kind, turn = place[2:], place[1] + 1
        if place[0] == "tools" or turn == len(messages) or not THOUGHT.search(f"{kind[0]} {kind[-1]}"):
            return False
        if kind not in self._thoughts and self._writes(messages[:turn], tools, number, place):
            self._thoughts.add(kind)
        return kind in self._thoughts

    def _shown(self, marked: Marked) -> tuple[str, Spans]:
        try:
            return self._rendered(marked.messages, marked.tools, mask=True)
        except ValueError:
            return "", []

    def _turn(self, messages: list[Message], number: int, tools: Any, text: str) -> tuple[int, int]:
        name = f"message {number + 1} ({ASSISTANT})"
        why = f"writes {name} only in the whole conversation, which does not tell where it begins"
        with suppress(ValueError):
            after, _ = self._rendered(messages[: number + 1], tools)
            before, _ = self._rendered(messages[:number], tools, prompt=True)
            if after.startswith(before) and text.startswith(after):
                return len(before), len(after)
            why = f"does not begin {name} as its generation prompt ends, {before[-20:]!r}"
            if not text.startswith(after):
                why = f"writes {name} differently once more turns follow"
        raise ValueError(
            f"the chat template {why}. Put {{% generation %}} and {{% endgeneration %}} around what the "
            "assistant says in it, and name it with --chat-template FILE"
        )

    def _template(self, tools: Any) -> str:
        """What transformers chooses for a record."""
        template: str = self._named.get_chat_template(tools=tools)
        if day := self._day:
            template = DATE.sub(lambda call: repr(day.strftime(call[2])), template)
        if "strftime_now(" in template:
            raise ValueError("the chat template writes today's date: set --today YYYY-MM-DD")
        return template

    def _rendered(
        self, messages: list[Message], tools: Any, *, prompt: bool = False, mask: bool = False
    ) -> tuple[str, Spans]:
        template = self._template(tools)
        mask = mask and bool(GENERATION.search(template))
        try:
            texts, spans = self._render(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=mask,
                **self._named.special_tokens_map,
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
        encodings = template.tokenizer.encodings(texts)
        for (position, document), (_, spans), encoding in zip(batch, rendered, encodings, strict=True):
            if longest is not None and len(encoding) > longest:
                left_out.long += 1
                continue
            tokens = np.array(encoding.ids, dtype=np.int32)
            learned = _learned(encoding.offsets, spans)
            if not learned[1:].any():  # nothing precedes the first
                left_out.unlearned += 1
                continue
            yield Document(position, source.name(document), tokens, learned.astype(np.int8))


class Marked:
    """Messages and tools with marks inside their texts; with `only`, that mark alone. `places` has the place
    of each."""

    def __init__(self, messages: list[Message], tools: list[Any] | None, only: int | None = None) -> None:
        self.places: dict[int, Place] = {}
        self._only, self._next = only, 0
        self._roles = [message["role"] for message in messages]
        # Where only one tool can be meant, calls need not name it.
        names = {_name(call) for message in messages for call in message.get("tool_calls", [])}
        self._names = max(len(names), len(tools or ())) > 1
        self.messages = self._marked(messages, ("messages",))
        self.tools = self._marked(tools, ("tools",))

    def _marked(self, value: Any, place: Place) -> Any:
        if isinstance(value, list):
            return [self._marked(inner, (*place, number)) for number, inner in enumerate(value)]
        if isinstance(value, dict):
            free = "arguments" in place or place[-1] == "properties"  # the keys are the user's too
            return {
                self._mark(key, (*place, key)) if free else key: self._marked(inner, (*place, key))
                for key, inner in value.items()
            }
        if not isinstance(value, str):
            return value
        if place[2:] == ("content",) and self._roles[place[1]] == ASSISTANT:
            thought, end, rest = value.rpartition(END_OF_THOUGHT)
            return self._mark(thought, (*place, "thought")) + end + self._mark(rest, place)
        return self._mark(value, place)

    def _mark(self, text: str, place: Place) -> str:
        """The text with marks after its first word and before its last, or inside its only one."""
        words = text.split()
        if not words:
            return text
        begin, end = len(text) - len(text.lstrip()), len(text.rstrip())
        places = {begin + len(words[0]), end - len(words[-1])}
        for at in sorted(places if len(words) > 1 else {(begin + end + 1) // 2}, reverse=True):
            if self._wanted(place):
                self.places[self._next] = place
                if self._only in (None, self._next):
                    text = f"{text[:at]}wqzx{self._next}xzqw{text[at:]}"
            self._next += 1
        return text

    def _wanted(self, place: Place) -> bool:
        """Whether a template must write what stands there."""
        key, last = place[2], place[-1]
        if place[0] == "tools":
            if "properties" in place:
                return place[-2] == "properties" and place.count("properties") == 1
            return last in ("name", "description")
        if "arguments" in place:
            return True
        if last == "name":
            return self._names if key == "tool_calls" else self._roles[place[1]] not in ("tool", "function")
        return key != "role" and not IDENTIFIER.search(str(last))


def _inner(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """All that a JSON value holds, itself included, with their places."""
    yield place, value
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield from _inner(value[key], (*place, key))


def _check_form(marked: Marked, messages: list[Message], text: str) -> None:
    """A ValueError if lists or objects are written as Python spells them, or arguments quoted twice."""
    for place, value in _inner({"messages": marked.messages, "tools": marked.tools}):
        as_json, misspelt = json.dumps(value, ensure_ascii=False, default=str), ""
        if isinstance(value, list | dict) and len(place) > 1 and str(value) != as_json:
            misspelt = str(value)
        elif place[-1:] == ("arguments",) and isinstance(value, str) and '"' in value:
            misspelt = as_json
        if misspelt and misspelt in text:
            raise ValueError(
                f"the chat template writes {_named(place, messages)} as Python spells it, or quotes it "
                "twice; write arguments as objects, or use a template that writes JSON (--chat-template FILE)"
            )


def _named(place: Place, messages: list[Message]) -> str:
    if place[0] == "tools":
        return f"the {place[-1]} of tool {place[1] + 1}"
    key = "" if place[2:3] in ((), ("content",)) else f"the {place[2]} of "
    return f"{key}message {place[1] + 1} ({messages[place[1]]['role']})"


def _name(call: Any) -> Any:
    """The name of the called function, which OpenAI's form nests."""
    function = isinstance(call, dict) and (call.get("function") or call)
    return function.get("name") if isinstance(function, dict) else None


def checked(messages: Any, special: list[str]) -> list[Message]:
    """The messages without empty keys; a ValueError if they are malformed or none can be learned."""
    if not isinstance(messages, list) or not messages:
        raise ValueError('the conversation is not a list of messages, {"role": ..., "content": ...}')
    result = []
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            detail = f"it has {', '.join(message)}; " if isinstance(message, dict) else ""
            raise ValueError(f'message {number} has no "role"; {detail}write {{"role": ..., "content": ...}}')
        message = {key: value for key, value in message.items() if value is not None}
        name = f"message {number} ({message['role']})"
        if message["role"] not in ROLES:
            raise ValueError(f"{name} has a role that is not known; write one of {', '.join(ROLES)}")
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or not all(isinstance(_name(call), str) for call in calls):
            raise ValueError(f'{name} calls an unnamed tool; write {{"function": {{"name": ..., ...}}}}')
        if not any(text.strip() for text in _texts(message, name)) and not calls:
            raise ValueError(f"{name} has no text")
        for key in filter(SWITCH.search, message):
            if key not in FOLLOWED or message[key] not in range(2 if message["role"] == ASSISTANT else 1):
                raise ValueError(
                    f"{name} has {key!r}: {message[key]!r}, which is not supported. {', '.join(FOLLOWED)} "
                    "may be 1 or 0, in messages of the assistant; otherwise remove it"
                )
        check_spelling(message, special, name)
        result.append(message)
    if all(message["role"] != ASSISTANT for message in result):
        raise ValueError(f'no message has the role "{ASSISTANT}", so nothing would be learned')
    return result


def check_spelling(value: Any, special: list[str], what: str) -> None:
    """A ValueError if any text in a JSON value spells a special token."""
    inner = (text for place, text in _inner(value) for text in (*place[-1:], text))  # keys as well
    texts = "\n".join(text for text in inner if isinstance(text, str))
    if spelt := [token for token in special if token in texts]:
        raise ValueError(f"{what} contains the special token {spelt[0]!r}, which only the template may write")


def _texts(message: Message, name: str = "") -> list[str]:
    """The parts of a content; a ValueError if any is no text."""
    content = message.get("content", "")
    parts = [{"text": content}] if isinstance(content, str) else content
    for part in parts if isinstance(parts, list) else [parts]:
        given = {k: v for k, v in part.items() if v is not None} if isinstance(part, dict) else {}
        if not isinstance(given.pop("text", None), str) or given not in ({}, {"type": "text"}):
            raise ValueError(f"the content of {name} has a part that is not text, {str(part)[:80]}")
    return [part["text"] for part in parts]


def _learned(offsets: list[tuple[int, int]], spans: Spans) -> np.ndarray:
    """bool (tokens,), whether any of a token's characters lies in a span."""
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    learned = np.zeros(len(begins), dtype=np.bool_)
    for begin, end in spans:
        learned |= (begins < end) & (np.maximum(ends, begins + 1) > begin)
    return learned
