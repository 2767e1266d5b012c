"""The Dockerfile's steps without Docker: in folders of their own, with nothing else of the checkout in reach.
Base image and Debian packages are this machine's, and flags that only change the image's size or start are
left out. It downloads what pip and uv do not have in their caches."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT

LEFT_OUT = re.compile(r" --(no-cache-dir|no-cache|compile-bytecode)\b")


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in dockerfile.splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line:
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


class Image:
    """What the steps leave: files below `root`, and an environment with no trace of this one's packages."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.entrypoint = root, root, [""]
        self.environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.environment["PATH"] = f"{Path(sys.executable).parent}:{self.environment['PATH']}"  # its python3

    def take(self, name: str, rest: str) -> None:
        if name == "ENV":
            for key, _, value in (word.partition("=") for word in shlex.split(rest)):
                value = value.replace("/opt/", f"{self.root}/opt/")
                self.environment[key] = value.replace("$PATH", self.environment["PATH"])
        elif name == "WORKDIR":
            self.folder = self.root / rest.lstrip("/")
            self.folder.mkdir()
        elif name == "COPY":
            *sources, target = rest.split()
            for source in (ROOT / source for source in sources):
                if source.is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(source, self.folder / target, ignore=ignored)
                else:
                    shutil.copy(source, self.folder / target)
        elif name == "RUN" and not rest.startswith("apt-get "):
            self.run("bash", "-ec", LEFT_OUT.sub("", rest))
        elif name == "ENTRYPOINT":
            self.entrypoint = json.loads(rest)
        else:
            assert name in ("ARG", "FROM", "RUN"), f"{name} {rest}: not a step that this test knows"

    def run(self, *words: str) -> str:
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        result = subprocess.run(words, cwd=self.folder, env=self.environment, **how)
        assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-3000:]}"
        return result.stdout


@pytest.mark.timeout(3600)
def test_the_steps_of_the_dockerfile_install_a_command_that_plans(tmp_path):
    image = Image(tmp_path)
    for name, rest in instructions((ROOT / "Dockerfile").read_text()):
        image.take(name, rest)
    for extra in ("wlb_titan", "wlb_titan.kernels", "transformers", "highspy", "kubernetes"):
        assert image.run("python", "-c", f"import {extra}; print({extra}.__file__)").startswith(str(tmp_path))
    assert "simulate" in image.run(*image.entrypoint, "--help")
    planned = image.run(*image.entrypoint, "plan", "llama2_7b_128k", "--lengths", "paper", "--steps", "3")
    assert "TP 8 x CP 2 x PP 4 x DP 1 = 64 ranks" in planned and "plain/per_sequence" in planned
