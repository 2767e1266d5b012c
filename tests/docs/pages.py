"""The commands of README and docs, read off their fenced blocks.

A ```bash block is commands, a ```console block commands after `$ ` with what they print below. Every other
block names its language too, and holds no command. A block that cannot be run has a comment in front of it:

    <!-- not run: needs a Slurm cluster -->
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:^<!-- not run: ([^>]+?) -->\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        line: where its text begins, from 1.
        language: as written.
        text: between the fences.
        excuse: why it cannot be run; None if it can.
    """

    line: int
    language: str
    text: str
    excuse: str | None

    @property
    def runnable(self) -> bool:
        return self.language in ("bash", "console") and self.excuse is None


@dataclass(frozen=True)
class Command:
    """A command as the page has it.

    Attributes:
        line: where it stands, from 1.
        text: with its continuation lines, as a shell takes it.
        output: what the page says that it prints, empty if it does not say.
    """

    line: int
    text: str
    output: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(text[: match.start(3)].count("\n") + 1, match[2], match[3], match[1])
        for match in BLOCK.finditer(text)
    ]


def commands(block: Block) -> list[Command]:
    """The commands of a `bash` or `console` block."""
    found: list[Command] = []
    lines = iter(enumerate(block.text.splitlines(), start=block.line))
    for number, line in lines:
        if block.language == "console" and not line.startswith("$ "):
            last = found.pop()
            found.append(Command(last.line, last.text, last.output + line + "\n"))
            continue
        command = line.removeprefix("$ ")
        while command.endswith("\\"):
            command += "\n" + next(lines)[1]
        if command.strip():
            found.append(Command(number, command, ""))
    return found


def toml_blocks(page: Path) -> list[str]:
    """The texts of the page's TOML blocks."""
    return [block.text for block in blocks(page) if block.language == "toml"]
