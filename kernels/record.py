"""Records of trials of Gluon's backward, by GPU, driver, Triton and kernels.

A trial (trial.py) runs in a process of its own, so that a launch that hangs or breaks the GPU's context costs
that process alone. Failures are recorded too, and not tried again. A record is a JSON file under the user's
cache folder ($XDG_CACHE_HOME, or ~/.cache): remove it to try again. Where there is no such folder nothing is
recorded, so every job takes Triton's backward.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import warnings
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

LIMIT = 900.0  # seconds of a trial; most of them are the compiler's
NOT_TRIED = 75  # exit status of a trial that could not be made, as for want of memory; not recorded
DRIVER = Path("/proc/driver/nvidia/version")


class Subject(NamedTuple):
    gpu: str
    driver: str
    triton: str
    kernels: str  # SHA-256 of their sources
    head_dims: tuple[int, int]  # D and Dv
    dtype: str

    @property
    def path(self) -> Path:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wlb_titan" / "kernels"
        return folder / f"{hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]}.json"

    def __str__(self) -> str:
        dims = " / ".join(map(str, self.head_dims))
        return f"{self.gpu}, driver {self.driver}, Triton {self.triton}, head dims {dims}, {self.dtype}"


class Verdict(NamedTuple):
    passed: bool  # all of a trial was right
    reason: str = ""  # what was not


def subject(device: torch.device, dims: tuple[int, int], dtype: torch.dtype) -> Subject:
    from triton import __version__

    text = DRIVER.read_text() if DRIVER.exists() else ""
    driver = re.search(r"\d+\.\d+(\.\d+)?", text)
    name = str(dtype).removeprefix("torch.")
    gpu = torch.cuda.get_device_name(device)
    return Subject(gpu, driver[0] if driver else "unknown", __version__, sources(), dims, name)


@cache
def sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def verdict(of: Subject) -> Verdict | None:
    """The recorded one; None if there is none, or its file is damaged."""
    try:
        found = json.loads(of.path.read_text())
        return Verdict(bool(found["passed"]), str(found["reason"]))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError):  # the last one: there is no home folder
        return None


def passed(device: torch.device, dims: tuple[int, int]) -> frozenset[tuple[tuple[int, int], torch.dtype]]:
    """These head dims with each dtype that has passed its trial."""
    every = ((dims, dtype) for dtype in (torch.bfloat16, torch.float16))
    return frozenset(one for one in every if (found := verdict(subject(device, *one))) and found.passed)


def tried(of: Subject, device: torch.device) -> Verdict:
    """Makes a trial on that GPU and records what came of it; the last line that it prints is the reason."""
    arguments = [str(device), *map(str, of.head_dims), of.dtype]
    command = [sys.executable, "-m", "wlb_titan.kernels.trial", *arguments]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    try:
        done = subprocess.run(command, timeout=LIMIT, **output)
    except subprocess.TimeoutExpired:
        return _recorded(of, Verdict(False, f"not ended after {LIMIT:.0f} s"))
    lines = [line for line in done.stdout.splitlines() if line.strip()] or ["no word"]
    if done.returncode == NOT_TRIED:
        return Verdict(False, lines[-1])
    if done.returncode < 0:
        lines.append(f"ended by signal {-done.returncode}, after: {lines[-1]}")
    return _recorded(of, Verdict(True) if done.returncode == 0 else Verdict(False, lines[-1]))


def _recorded(of: Subject, found: Verdict) -> Verdict:
    try:
        of.path.parent.mkdir(parents=True, exist_ok=True)
        new = of.path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"of": of._asdict(), **found._asdict()}, indent=1) + "\n")
        new.replace(of.path)  # whole, though others read it meanwhile
    except (OSError, RuntimeError) as error:
        warnings.warn(f"What came of the trial cannot be recorded, for jobs to read: {error}", stacklevel=2)
    return found
