"""Conversations as documents: what of them is learned, and what is said about those that cannot be used."""

import json
import shutil

import datasets
import numpy as np
import pytest
from chats import (
    ANSWERS,
    CHATS,
    LAST,
    MARKED,
    OPENED,
    PLAIN,
    REWRITING,
    SYSTEM,
    learned_texts,
    prepare,
    said,
    talk,
    with_template,
    write_lines,
)
from commands import ROOT, invoke
from corpora import decode
from tokenizers import AddedToken, Tokenizer

from wlb_titan.corpus import Corpus, CorpusError
from wlb_titan.prepare.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A folder with a tokenizer that knows the marks of the templates; `with_template` gives it one."""
    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    train_tokenizer(["How many are two or three? " * 20], 300, folder)
    own = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|turn|>", "<|end|>")])
    own.save(str(folder / "tokenizer.json"))
    return folder


def test_the_assistant_s_turns_are_learned(tmp_path, tokenizer):
    """By prefixes; the next test has marks."""
    corpus = prepare(tmp_path, tokenizer, PLAIN)
    assert learned_texts(corpus) == ANSWERS
    whole = decode(tokenizer, corpus.tokens(0))
    assert whole.count("<|turn|>") == whole.count("<|end|>") == 4


def test_the_masks_are_those_of_transformers(tmp_path, tokenizer):
    from transformers import PreTrainedTokenizerFast

    corpus = prepare(tmp_path, tokenizer, MARKED)
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    rows = {corpus.source(row): row for row in range(len(corpus))}
    for number, chat in enumerate(CHATS, start=1):
        encoded = theirs.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
        row = rows[f"chat.jsonl:{number}"]
        assert corpus.tokens(row).tolist() == encoded["input_ids"]
        assert corpus.learned(row, 0, int(corpus.lengths[row])).tolist() == encoded["assistant_masks"]


MARK = {"content": "<|turn|>", "special": True}


@pytest.mark.parametrize(
    "beside", [{"added_tokens_decoder": {"299": MARK}}, {"extra_special_tokens": ["<|turn|>"]}]
)
def test_tokens_that_only_the_files_beside_tokenizer_json_have(tmp_path, tokenizer, beside):
    from transformers import AutoTokenizer

    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    tokens = json.loads((folder / "tokenizer.json").read_text())
    tokens["added_tokens"] = [token for token in tokens["added_tokens"] if token["content"] != "<|turn|>"]
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | beside))
    corpus = prepare(tmp_path, folder, PLAIN, CHATS[:1])
    theirs = AutoTokenizer.from_pretrained(folder)
    assert corpus.tokens(0).tolist() == theirs.apply_chat_template(CHATS[0])["input_ids"]
    ids = {"input_ids": [corpus.tokens(0)]}
    datasets.Dataset.from_dict(ids).save_to_disk(tmp_path / "theirs")
    other = Corpus.open(tmp_path / "theirs", tokenizer=str(folder))
    assert other.tokenizer.vocab_size == corpus.tokenizer.vocab_size == len(theirs)
    other.check_sample(other.tokenizer.vocab_size)
    with pytest.raises(CorpusError, match=r"message 1 .* contains the special token '<\|turn\|>'"):
        prepare(tmp_path, folder, PLAIN, [talk("<|turn|>", "a")])


def test_records_with_tools_have_the_template_that_transformers_takes(tmp_path, tokenizer):
    from transformers import AutoTokenizer

    folder = shutil.copytree(tokenizer, tmp_path / "tokenizer")
    (folder / "additional_chat_templates").mkdir()
    for name, text in {"chat_template": PLAIN, "additional_chat_templates/tool_use": ALL}.items():
        (folder / f"{name}.jinja").write_text(text)
    chats = {"1": TOOLS, "2": None}
    lines = [json.dumps({"messages": CHATS[0], "tools": tools}) for tools in chats.values()]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    how = {"template": None, "source": f"jsonl:{tmp_path}/chat.jsonl"}
    corpus = prepare(tmp_path, folder, **how)
    theirs = AutoTokenizer.from_pretrained(corpus.tokenizer_path)
    for row in range(2):
        encoded = theirs.apply_chat_template(CHATS[0], tools=chats[corpus.source(row)[-1]])
        assert corpus.tokens(row).tolist() == encoded["input_ids"]
    with pytest.raises(CorpusError, match="drops the name of tool 1"):
        prepare(tmp_path, folder, **how, chat_template=str(folder / "chat_template.jinja"))


@pytest.mark.filterwarnings("error")
def test_answers_that_teach_no_end_are_counted(tmp_path, tokenizer):
    half = MARKED.replace("{{ m['content'] }}<|end|>{% endg", "{{ m['content'] }}{% endg")
    for template in (PLAIN, MARKED):
        prepare(tmp_path, tokenizer, template)
    with pytest.raises(UserWarning, match="3 of 3 learned parts end without a special token"):
        prepare(tmp_path, tokenizer, half)


WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function']['arguments'] | tojson }}"
    "{% endfor %}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
)


def asked(text, **arguments):
    """A user's words, and a call of a tool."""
    call = {"function": {"name": "f", "arguments": arguments}}
    return [said("user", text), said("assistant", "I ask.", tool_calls=[call])]


def test_arguments_that_a_tool_call_does_not_have_are_not_learned(tmp_path, tokenizer):
    """Arrow gives every call of a Parquet file the arguments of all, with no value."""
    chats = [asked("Hot?", city="Rome"), asked("Far?", unit="km", at=[{"a": 1}])]
    tools = [[{"name": "f", "of": {"city": "text"}}], [{"name": "g", "of": {"unit": "text"}}]]
    datasets.Dataset.from_dict({"messages": chats, "tools": tools}).to_parquet(tmp_path / "chat.parquet")
    corpus = prepare(tmp_path, tokenizer, WITH_TOOLS, source=f"parquet:{tmp_path}/chat.parquet")
    assert not any("null" in decode(tokenizer, corpus.tokens(row)) for row in range(2))
    answers = ['{"city": "Rome"}', '{"unit": "km", "at": [{"a": 1}]}']
    assert learned_texts(corpus) == [[f"I ask.{answer}<|end|>"] for answer in answers]


def test_a_null_that_a_line_of_json_spells_stays(tmp_path, tokenizer):
    corpus = prepare(tmp_path, tokenizer, WITH_TOOLS, [asked("Hot?", city=None)])
    assert learned_texts(corpus) == [['I ask.{"city": null}<|end|>']]


THINKING = PLAIN.replace("{{ m['content'] }}", "{{ m['reasoning_content'] or '' }}{{ m['content'] }}")
THOUGHT_IF_LAST = "{% if loop.last %}{{ m['reasoning_content'] or '' }}{% endif %}"
SPELLING = {
    "reasoning": [said("user", "a"), said("assistant", "b", reasoning_content="Hm <|end|>")],
    "arguments": asked("a", city="<|end|>"),
    "names": asked("a", **{"<|end|>": 1}),
    "tools": CHATS[0],
}


@pytest.mark.parametrize("where", SPELLING)
def test_special_tokens_are_found_wherever_they_are_spelt(tmp_path, tokenizer, where):
    tools = [{"name": "<|end|>"}] if where == "tools" else []
    source = write_lines(tmp_path / "chat.jsonl", [SPELLING[where]], tools=tools)
    what = "a tool" if where == "tools" else r"message 2 \(assistant\)"
    with pytest.raises(CorpusError, match=rf"1: {what} contains the special token '<\|end\|>'"):
        prepare(tmp_path, tokenizer, WITH_TOOLS, source=source)


def test_thoughts_of_the_last_turn_are_not_dropped_in_silence(tmp_path, tokenizer):
    """Those of earlier turns may be, as Qwen3's template does, where it writes those of the last."""
    chat = [said("user", "a"), said("assistant", "A", reasoning_content="Hm A")]
    with pytest.raises(CorpusError, match="drops the reasoning_content of message 2"):
        prepare(tmp_path, tokenizer, PLAIN, [chat])
    assert learned_texts(prepare(tmp_path, tokenizer, THINKING, [chat])) == [["Hm AA<|end|>"]]
    with pytest.raises(CorpusError, match="drops the reasoning_content of message 2"):
        prepare(tmp_path, tokenizer, MARKED, [chat + talk("b", "B")])
    answer = "{{ m['content'] }}<|end|>{% end"
    last = MARKED.replace(answer, THOUGHT_IF_LAST + answer)
    corpus = prepare(tmp_path, tokenizer, last, [chat + talk("b", "B")])
    assert learned_texts(corpus) == [["A<|end|>", "B<|end|>"]]
    assert learned_texts(prepare(tmp_path, tokenizer, last, [chat])) == [["Hm AA<|end|>"]]


def chatml(written, head=""):
    """A template that writes so of each message `m`."""
    return head + PLAIN.replace("{{ m['content'] }}", written)


EACH = "{% for c in m.tool_calls or [] %}"
CALLS = EACH + "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}"
INDENTED = "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}"
ALL = chatml("{{ m.content or '' }}" + CALLS, INDENTED)
OF_TOOL = "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}"
QUOTED = chatml(OF_TOOL + "{{ m.content or '' }}{% endif %}" + CALLS)
PARTS = "{% for p in m.content %}[{{ p.text }}]{% endfor %}"
LISTS = chatml("{% if m.content is string %}{{ m.content }}{% else %}" + PARTS + "{% endif %}")
IF_LAST = "{% if loop.last %}{{ m.reasoning_content }}{{ m.content }}{% else %}"
OLD = IF_LAST + "{{ m.content.split('</think>')[-1] }}{% endif %}<|end|>{% endg"
FORGETFUL = MARKED.replace("{{ m['content'] }}<|end|>{% endg", OLD)
FIRST = chatml("{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}")
CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS = [{"function": {"name": "f", "description": "Tells all", "parameters": {"properties": {"city": {}}}}}]
FOUND = said("tool", '{"t": 31,\n "x": "a\\"b"}', tool_call_id="1", name="f")
CALLED = [*asked("Hot?", city="Rome"), FOUND, said("assistant", " Yes.\n")]
TEXT = [{"type": "text", "text": "Two "}, {"type": "text", "text": "parts"}]


def of_turn(text="5.", **more):
    return [*spoken(text, **more), *talk("b", "4.")]


def spoken(text, **more):
    return [said("user", "a"), said("assistant", text, **more)]


def by_user(**more):
    return [said("user", "a", **more), said("assistant", "b")]


ONE_CALL = chatml("{{ m.content }}{% if m.tool_calls %}f{% endif %}")
TEXT_ALONE = chatml("{{ m.content if m.content is string else '' }}")
NO_MARKS = MARKED.replace("== 'assistant'", "== 'model'")
AS_PYTHON = "tool_calls of message 2 .* as Python"
UNLEARNED = "Of 1 conversations nothing is learned"
WRITTEN = {  # messages, template, and what is learned or a part of the refusal
    "json": (CALLED, QUOTED, ['I ask.f {"city": "Rome"}<|end|>', " Yes.\n<|end|>"]),
    "trimmed": (spoken("  d  e \n"), chatml("{{ m.content | trim }}"), ["d  e<|end|>"]),
    "respaced": (spoken(" d  e\n"), chatml("{{ m.content.split() | join(' ') | upper }}"), ["D E<|end|>"]),
    "cut": (spoken("two words " * 9), chatml("{{ m.content[:50] }}"), "drops message 2"),
    "calls": (CALLED, PLAIN, r"drops the tool_calls of message 2 \(assistant\)"),
    "no arguments": (CALLED, ONE_CALL, "drops the tool_calls"),
    "one call of two": (spoken("", tool_calls=[CALL, CALL]), FIRST, "drops the tool_calls"),
    "call without name": (spoken("b", tool_calls=[{}]), ALL, r"2 \(assistant\) calls an unnamed tool"),
    "call of text": (spoken("b", tool_calls=[{"function": "f"}]), ALL, "calls an unnamed tool"),
    "calls as Python": (CALLED, chatml("{{ m.content }}{{ m.tool_calls or '' }}"), AS_PYTHON),
    "arguments as Python": (CALLED, ALL.replace("arguments | tojson", "arguments"), AS_PYTHON),
    "arguments quoted twice": (spoken("b", tool_calls=[CALL]), ALL, "quotes it twice"),
    "parts joined": (spoken(TEXT), PLAIN, ["Two parts<|end|>"]),
    "parts dropped": (spoken(TEXT), TEXT_ALONE, ["Two parts<|end|>"]),
    "parts followed": (spoken(TEXT), LISTS, ["[Two ][parts]<|end|>"]),
    "picture": (spoken([{"type": "image", "url": "x"}, *TEXT]), LISTS, "has a part that is not text"),
    "object": (spoken({"a": 1}), PLAIN, "has a part that is not text"),
    "name": (by_user(name="Eve"), PLAIN, r"the name of message 1 \(user\)"),
    "unknown": (spoken("b", refusal="I cannot"), PLAIN, "the refusal of message 2"),
    "ids and numbers": (spoken("b", id="x", time=12, flagged=False), PLAIN, ["b<|end|>"]),
    "old thoughts": (of_turn(reasoning_content="Hm"), FORGETFUL, ["5.<|end|>", "4.<|end|>"]),
    "old inner thoughts": (of_turn("<think>Hm</think>5."), FORGETFUL, ["5.<|end|>", "4.<|end|>"]),
    "weight": (of_turn(weight=0), PLAIN, ["4.<|end|>"]),
    "train": (of_turn(train=False, loss=None), MARKED, ["4.<|end|>"]),
    "weights of 1": (of_turn(weight=1.0, training=True), MARKED, ["5.<|end|>", "4.<|end|>"]),
    "fraction": (of_turn(weight=0.5), PLAIN, r"2 \(assistant\) has 'weight': 0.5, which is not supported"),
    "word": (of_turn(train="no"), PLAIN, "has 'train': 'no'"),
    "another switch": (of_turn(loss_mask=[1]), PLAIN, "has 'loss_mask'"),
    "the user's": (by_user(weight=1), PLAIN, r"1 \(user\) has 'weight': 1"),
    "not the user's": (by_user(weight=0), PLAIN, ["b<|end|>"]),
    "nothing": (spoken("b", weight=0), PLAIN, UNLEARNED),
    "no marks": (spoken("b"), NO_MARKS, UNLEARNED),
}


def assert_learned(expected, *given, **options):
    """What is learned of the only conversation; or what its refusal says."""
    if isinstance(expected, str):
        with pytest.raises(CorpusError, match=expected):
            prepare(*given, **options)
    else:
        assert learned_texts(prepare(*given, **options)) == [[text.strip("\n") for text in expected]]


@pytest.mark.parametrize("name", WRITTEN)
def test_what_a_conversation_says_is_written_followed_or_refused(name, tmp_path, tokenizer):
    messages, template, expected = WRITTEN[name]
    assert_learned(expected, tmp_path, tokenizer, template, [messages])


NAMES = "{% for t in tools or [] %}{{ t.function.name }}{{ t.function.description }}{% endfor %}"
FIRST_NAME = "{{ (tools or [{}])[0].function.name }}"
RECORDS = {
    "tools": ({"tools": TOOLS}, ALL, ""),
    "dropped": ({"tools": TOOLS}, PLAIN, "drops the name of tool 1"),
    "half dropped": ({"tools": TOOLS}, chatml("{{ m.content }}", FIRST_NAME), "the description of tool 1"),
    "no parameters": ({"tools": TOOLS}, chatml("{{ m.content }}", NAMES), "drops the city of tool 1"),
    "as Python": ({"tools": TOOLS}, chatml("{{ m.content }}", "{{ tools }}"), "as Python"),
    "weight": ({"weight": 0.5}, PLAIN, "1: the record has a key 'weight', which is not read"),
    "weight of 0": ({"weight": 0}, PLAIN, "the record has a key 'weight'"),
    "system": ({"system": "Be brief."}, PLAIN, "the record has a key 'system'"),
    "others": ({"id": "x", "source": "web", "weight": 1, "system": None}, PLAIN, ""),
    "numbers": ({"score": 0.5, "n_turns": 2, "good": True}, PLAIN, ""),
    "text of the messages": ({"prompt": "a"}, PLAIN, ""),
    "other text": ({"prompt": "c"}, PLAIN, "the record has a key 'prompt'"),
    "long source": ({"source": "web " * 99}, PLAIN, "the record has a key 'source'"),
    "history": ({"history": [["c", "d"]]}, PLAIN, "a key 'history', which is not read; remove it, or put it"),
    "object": ({"meta": {"a": 1}}, PLAIN, "the record has a key 'meta'"),
    "nothing else": ({"chat_template_kwargs": {}, "tools": ""}, PLAIN, ""),
    "names of tools": ({"tools": ["f"]}, PLAIN, "the chat template refuses it"),
}


@pytest.mark.parametrize("name", RECORDS)
def test_what_stands_beside_a_conversation_is_written_or_refused(name, tmp_path, tokenizer):
    more, template, message = RECORDS[name]
    source = write_lines(tmp_path / "chat.jsonl", [talk("a", "b")], **more)
    assert_learned(message or ["b<|end|>"], tmp_path, tokenizer, template, source=source)


def test_conversations_that_teach_nothing_or_are_long_are_left_out_and_counted(tmp_path, tokenizer):
    corpus = prepare(tmp_path, tokenizer, PLAIN, [spoken("b", weight=0), *CHATS])
    assert (len(corpus), corpus.preparation.unlearned_documents) == (2, 1)
    assert learned_texts(corpus) == ANSWERS
    lengths = sorted(np.asarray(prepare(tmp_path, tokenizer, PLAIN).lengths).tolist())
    for longest, kept in {lengths[1]: 2, lengths[1] - 1: 1, lengths[0]: 1}.items():
        corpus = prepare(tmp_path, tokenizer, PLAIN, max_length=longest)
        assert sorted(np.asarray(corpus.lengths).tolist()) == lengths[:kept]
        assert corpus.preparation.long_documents == 2 - kept
    with pytest.raises(CorpusError, match="0 documents are empty, 2 too long"):
        prepare(tmp_path, tokenizer, PLAIN, max_length=lengths[0] - 1)


def test_the_example_s_template_writes_parts_calls_and_tools(tmp_path, tokenizer):
    template = ROOT / "examples/chat/template.jinja"
    source = write_lines(tmp_path / "chat.jsonl", [[*CALLED[:3], said("assistant", TEXT)]], tools=TOOLS)
    corpus = prepare(tmp_path, tokenizer, template.read_text(), source=source)
    ends = "<|endoftext|>"
    assert learned_texts(corpus) == [[f'I ask.\ncall f: {{"city": "Rome"}}{ends}', f"Two parts{ends}"]]


NO_ROLE = 'message 1 has no "role"'
BAD = {
    "text": ("hello", PLAIN, "not a list of messages"),
    "no messages": ([], PLAIN, "not a list of messages"),
    "no role": ([{"content": "One?"}, *talk("a", "b")], PLAIN, f"{NO_ROLE}; it has content"),
    "another schema": ([{"from": "human", "value": "Hi"}], PLAIN, f"{NO_ROLE}; it has from, value"),
    "empty turn": (talk("Hi", " \n"), PLAIN, r"2 \(assistant\) has no text"),
    "no assistant": (talk("Hi"), PLAIN, "nothing would be learned"),
    "another role": ([*CHATS[0], said("tool_call", "f")], PLAIN, r"5 \(tool_call\) has a role that"),
    "greeting": ([said("assistant", "a"), *talk("b", "c")], SYSTEM, "message 1 .* whole conversation"),
    "opened thought": (talk("a", "b"), OPENED, r"message 2 .* generation prompt ends, '.*<think>"),
    "special token": (talk("<|end|>", "a"), PLAIN, r"special token '<\|end\|>'"),
    "surrogate": (talk("\ud800", "a"), PLAIN, "surrogates not allowed"),
    "rewriting": (CHATS[0], REWRITING, r"writes message 2 \(assistant\) differently once more turns follow"),
    "dropping one of two alike": (talk("Same", "Same"), LAST, "drops message 1"),
    "dropping": (CHATS[0], LAST, r"drops message 1 \(user\)"),
    "refusing": (CHATS[0], "{{ raise_exception('only one turn') }}", "refuses it: only one turn"),
    "no syntax": (CHATS[0], "{% for m in messages %}", "the chat template refuses it: "),
    "no template": (CHATS[0], "", r"The tokenizer \S*/tokenizer\d+/tokenizer has no chat template"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_conversations_end_the_preparation_with_file_and_line(name, tmp_path, tokenizer):
    chat, template, expected = BAD[name]
    before = [CHATS[1]] if template == PLAIN else []
    place = "" if name == "no template" else rf"^chat\.jsonl:{1 + len(before)}: .*"
    with pytest.raises(CorpusError, match=place + expected):
        prepare(tmp_path, tokenizer, template, [*before, chat])
    assert not (tmp_path / "corpus").exists()


def test_the_command_shows_what_is_learned(tmp_path, tokenizer):
    source = write_lines(tmp_path / "chat.jsonl", CHATS[1:])
    template = tmp_path / "template.jinja"
    template.write_text(MARKED)
    words = ["prepare", str(tmp_path / "c"), "--source", source, "--tokenizer", with_template(tokenizer, "")]
    prepared = invoke(*words, "--chat", "--chat-template", template)
    assert prepared.exit_code == 0, prepared.output
    assert "[Two<|end|>]" in prepared.stdout and "learned  " in prepared.stdout
    assert (Corpus.open(tmp_path / "c").tokenizer_path / "chat_template.jinja").is_file()
    again = invoke(*words, "--chat")
    assert again.exit_code == 2 and "made with other settings: chat_template is" in again.stderr


@pytest.mark.slow
def test_a_template_that_writes_the_date_gets_one_that_is_kept(tmp_path, tokenizer):
    dated = "{{ strftime_now('%d %B %Y') }}\n" + PLAIN
    with pytest.raises(CorpusError, match=r"writes today's date: set --today YYYY-MM-DD"):
        prepare(tmp_path, tokenizer, dated)
    with pytest.raises(CorpusError, match="--today: Invalid isoformat string: 'noon'"):
        prepare(tmp_path, tokenizer, dated, today="noon")
    corpus = prepare(tmp_path, tokenizer, dated, today="2026-11-27")
    assert decode(corpus.tokenizer_path, corpus.tokens(0)).startswith("27 November 2026\n")
    assert corpus.preparation.settings["today"] == "2026-11-27" and learned_texts(corpus) == ANSWERS
