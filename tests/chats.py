"""Conversations, templates of them, and how they are prepared."""

import json
import shutil
from itertools import cycle

import numpy as np
from corpora import decode

from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus

PLAIN = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
)
REWRITING = (  # as Qwen3's, which has no thoughts in any turn but the last
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{% if loop.last %}<think></think>{% endif %}"
    "{{ m['content'] }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
SYSTEM = "{% if messages[0].role == 'system' %}Be brief.{% endif %}" + PLAIN
OPENED = PLAIN.replace("assistant\n{% e", "assistant\n<think>{% e")
LAST = "{{ messages[-1]['role'] }}: {{ messages[-1]['content'] }}\n"


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def talk(*contents):
    """A conversation that a user begins and an assistant answers in turn."""
    turns = zip(cycle(["user", "assistant"]), contents, strict=False)
    return [said(role, content) for role, content in turns]


CHATS = [
    talk("How many?", "Zwölf 🍰 or more.", "Why?", "So."),
    [said("system", "Be brief."), *talk("One", "Two", "Three")],
]
ANSWERS = [["Zwölf 🍰 or more.<|end|>", "So.<|end|>"], ["Two<|end|>"]]


def with_template(folder, template):
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return str(folder)


def write_lines(path, chats, **more):
    path.write_text("".join(json.dumps({"messages": chat, **more}) + "\n" for chat in chats))
    return f"jsonl:{path}"


def prepare(tmp_path, tokenizer, template, chats=CHATS, source=None, **options):
    source, folder = source or write_lines(tmp_path / "chat.jsonl", chats), tmp_path / "corpus"
    shutil.rmtree(folder, ignore_errors=True)
    own = with_template(tokenizer, template)
    return prepare_corpus(PrepareSettings(source=source, tokenizer=own, chat=True, **options), folder)


def learned_texts(corpus):
    """Of each document in the order of the source: the stretches that are learned, as text."""
    found = {}
    for row, length in enumerate(np.asarray(corpus.lengths).tolist()):
        tokens, learned = corpus.tokens(row), corpus.learned(row, 0, length)
        edges = np.flatnonzero(np.diff([0, *learned, 0])).reshape(-1, 2)
        texts = [decode(corpus.tokenizer_path, tokens[begin:end]) for begin, end in edges]
        found[corpus.source(row)] = [text.strip("\n") for text in texts]
    return [found[name] for name in sorted(found)]
