"""Every command of README and docs is run, page by page in a fresh folder, on data made small.

A ```bash block is commands, a ```console block commands after `$ ` with what they print below. Every other
block names its language too, and holds no command. What cannot be run has a comment in front of it:
<!-- not run: needs a Slurm cluster -->
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from commands import ROOT
from wlb_titan.launch import components

from wlb_titan.commands.main import main

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(^<!-- not run: [^>]+? -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SMALL = "--training.steps 2 --training.seq_len 512"
SMALLER = (
    # What is made smaller before a command is run: a pattern, and what takes its place.
    (r"--max-tokens (?!4000000\b)\d+", "--max-tokens 300000"),  # so many has the corpus of `make train`
    (r"(wlb-titan prepare (?!.*--(?:source|max-tokens))[^#]*?)\s*(#.*)?$", r"\1 --max-tokens 300000"),
    (r"(?<=\s)--steps \d+", "--steps 3"),
    (r"(wlb-titan (?:simulate|plan) (?!.*--steps)(?:(?! -- ).)*)( -- .*)?$", r"\1 --steps 3\2"),
    (r"(?<=-- )--training\.steps \d+", SMALL),
    (r"(wlb-titan train [^#]*?)--training\.steps \d+", rf"\1{SMALL}"),
    (r"^(wlb-titan train (?!.*--training\.steps)[^#]*?)\s*(#.*)?$", rf"\1 {SMALL}"),
    (r"(torchx run wlb\.train (?!.* -- ).*)$", rf"\1 -- {SMALL}"),
    (r"(wlb-titan bench [^#]*)$", rf"\1 --rounds 2 {SMALL}"),
    (r"(torchx run wlb\.bench .* -- )", rf"\1--wlb.bench.rounds 2 {SMALL} "),
    (r"^make train\b", f"make train OPTIONS='{SMALL}'"),
    (r"^make test\b", "make quick"),  # the whole is a step of its own in .ci/run
    (r"dryrun (.*)llama2_70b_128k\.toml", r"dryrun \1llama2_550m_64k.toml"),
    # Jobs of a Slurm cluster are made and not submitted.
    (r"^torchx run -s slurm", "torchx run --dryrun -s slurm"),
)
LANGUAGES = {"bash", "console", "toml", "python", "text"}
COMMAND = re.compile(r"^\s*(\$ )?([A-Z_0-9]+=\S+ )*(wlb-titan|torchx|make|python|pip|hf)\s", re.MULTILINE)
INLINE = re.compile(r"`((?:[A-Z_0-9]+=\S+ )*(?:wlb-titan|torchx|python) [^`]*)`")


class Block(NamedTuple):
    line: int  # where its text begins, from 1
    language: str
    text: str
    runnable: bool


class Command(NamedTuple):
    line: int
    text: str  # with its continuation lines, as a shell takes it
    output: str = ""  # what the page says that it prints


def blocks(page: Path) -> list[Block]:
    text, found = page.read_text(), []
    for match in BLOCK.finditer(text):
        line = text[: match.start(3)].count("\n") + 1
        runnable = match[2] in ("bash", "console") and not match[1]
        found.append(Block(line, match[2], match[3], runnable))
    return found


def commands(block: Block) -> list[Command]:
    """The commands of a `bash` or `console` block."""
    found: list[Command] = []
    lines = iter(enumerate(block.text.splitlines(), start=block.line))
    for number, line in lines:
        if block.language == "console" and not line.startswith("$ "):
            found[-1] = found[-1]._replace(output=found[-1].output + line + "\n")
            continue
        command = line.removeprefix("$ ")
        while command.endswith("\\"):
            command += "\n" + next(lines)[1]
        if command.strip():
            found.append(Command(number, command))
    return found


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.fixture
def folder(tmp_path):
    """A checkout: links to the repository's files, but no outputs."""
    for entry in ROOT.iterdir():
        if entry.name not in ("outputs", ".git"):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 1800}
    return subprocess.run(["bash", "-c", command], cwd=folder, env={**os.environ, "PATH": path}, **how)


def taken_for_granted(page: Path, folder: Path) -> None:
    """Makes the files that a page speaks of and does not make itself."""
    if page.name in ("configuration.md", "corpus.md", "launch.md", "packing.md", "simulator.md"):
        tokens = 4000000 if page.name == "launch.md" else 300000  # which it prepares again
        made = shell(f"wlb-titan prepare outputs/corpus --max-tokens {tokens}", folder)
        assert made.returncode == 0, made.stdout
    tomls = [block.text for block in blocks(page) if block.language == "toml"]
    files = {name[1]: text for text in tomls if (name := re.match(r"# (\w+\.toml)\n", text))}
    if page.name == "configuration.md":
        files |= {"train.toml": tomls[0], "long.toml": tomls[1]}
    if page.name == "models.md":
        gone = "torchtitan.models.deepseek_v3.config_registry:deepseek_v3_debugmodel_mtp"
        files["long.toml"] = f'base = "{gone}"\n'
    if page.name == "packing.md":
        files["train.toml"] = 'extends = "train_configs/cpu_debug.toml"\n'
    if page.name == "simulator.md":
        files["lengths.txt"] = "".join(f"{500 + 37 * n % 90_000}\n" for n in range(4000))
    if page.name == "corpus.md":
        texts = [f"text {number} " * (1 + number % 50) for number in range(200)]
        files |= {f"books/{number}.txt": text for number, text in enumerate(texts)}
        files["texts/all.jsonl"] = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / "assets").mkdir()
        (folder / "data").mkdir()
        for name in ("llama2", "llama3"):
            shutil.copytree(folder / "outputs" / "corpus" / "tokenizer", folder / "assets" / name)
        for name in ("web", "books"):
            (folder / "data" / name).symlink_to("../outputs/corpus")
        (mixture,) = [text for text in tomls if "[[wlb.corpus.sources]]" in text]
        files["mixture.toml"] = f'extends = "train_configs/cpu_debug.toml"\n{mixture}'
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def run(command: Command, folder: Path) -> None:
    """Runs a command; where nothing was made smaller, it must print what the page says.

    One that the page shows with an error must end with it.
    """
    text = command.text
    for pattern, replacement in SMALLER:
        text = re.sub(pattern, replacement, text.replace("\\\n", " "))
    result = shell(text, folder)
    wrong = command.output.startswith("Error:")
    assert (result.returncode != 0) == wrong, f"line {command.line}: {text}\n{result.stdout[-3000:]}"
    if command.output and text == command.text:  # `...` stands for anything, and space for any space
        parts = [r"\s+".join(map(re.escape, part.split())) for part in command.output.split("...")]
        assert re.search(r"[\s\S]*".join(parts), result.stdout), f"line {command.line}: {result.stdout}"


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_every_block_names_its_language(page):
    """So that none is passed over: a block of another language holds no command."""
    for block in blocks(page):
        assert block.language in LANGUAGES, f"line {block.line}: the block names no language of {LANGUAGES}"
        if block.language not in ("bash", "console"):
            assert not COMMAND.search(block.text), f"line {block.line}: a command in a {block.language} block"
    text = page.read_text()
    assert not re.search(r"^ {4,}(wlb-titan|torchx|make|python) ", text, re.MULTILINE), "put it in a block"


RUNNABLE = [page for page in PAGES if any(b.runnable and commands(b) for b in blocks(page))]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", RUNNABLE, ids=names(RUNNABLE))
def test_the_commands_of_a_page(page, folder):
    taken_for_granted(page, folder)
    for block in blocks(page):
        if block.runnable:
            for command in commands(block):
                run(command, folder)


INLINE_COMMANDS = [command for page in PAGES for command in INLINE.findall(page.read_text())]


@pytest.mark.parametrize("command", [command for command in INLINE_COMMANDS if " " in command.strip()])
def test_commands_within_text_name_what_there_is(command):
    """Benchmarks take minutes: they are not run, but program and options must be there."""
    words = shlex.split(re.sub(r"^([A-Z_0-9]+=\S+ )*", "", command))
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    if words[0] == "wlb-titan":
        group: click.Command | None = main
        for word in words[1:]:
            if not isinstance(group, click.Group):
                break
            if word.startswith("-"):
                continue
            group = group.get_command(click.Context(main), word)
            assert group is not None, f"{command}: there is no {word}"
        known = {name for option in group.params for name in option.opts} | {"--help"}
        keys = {option for option in options if "." in option}  # of the configuration
        assert set(options) - keys <= known, f"{command}: {set(options) - keys - known}"
        assert not keys or group.context_settings.get("ignore_unknown_options"), f"{command}: takes no {keys}"
    elif words[:2] == ["torchx", "run"]:
        named = {word.removeprefix("wlb.") for word in words if word.startswith("wlb.")}
        assert all(hasattr(components, name) for name in named), command
    elif words[1] == "-m":
        assert (ROOT / words[2].replace(".", "/")).with_suffix(".py").is_file(), command
    elif words[0] == "python":
        script = (ROOT / words[1]).read_text()
        assert all(f'"{option}"' in script for option in options), command
