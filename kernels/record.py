"""Records of trials of Gluon's backward, by GPU, driver, Triton and kernels.

A trial (stress.py) runs in a process of its own, so that a launch that hangs or breaks the GPU's context
costs that process alone. Failures are recorded too, and not tried again. A record is a JSON file under the
user's cache folder ($XDG_CACHE_HOME, or ~/.cache): remove it to try again.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
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
        name = hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]
        return folder() / f"{name}.json"

    def __str__(self) -> str:
        dims = " / ".join(map(str, self.head_dims))
        return f"{self.gpu}, driver {self.driver}, Triton {self.triton}, head dims {dims}, {self.dtype}"


class Verdict(NamedTuple):
    passed: bool  # all of a trial was right
    reason: str = ""  # what was not


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wlb_titan" / "kernels"


def subject(device: torch.device, dims: tuple[int, int], dtype: torch.dtype) -> Subject:
    text = DRIVER.read_text() if DRIVER.exists() else ""
    driver = re.search(r"\d+\.\d+(\.\d+)?", text)
    gpu = torch.cuda.get_device_name(device)
    name = str(dtype).removeprefix("torch.")
    return Subject(gpu, driver[0] if driver else "unknown", _triton(), sources(), dims, name)


def _triton() -> str:
    try:
        from triton import __version__
    except ImportError:
        return "none"
    return __version__


@cache
def sources() -> str:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.name.encode() + file.read_bytes() for file in files)).hexdigest()


def verdict(of: Subject) -> Verdict | None:
    """The recorded one; None if there is none, or its file is damaged or about something else."""
    try:
        found = json.loads(of.path.read_text())
        about = of._replace(head_dims=list(of.head_dims))._asdict()
        return Verdict(bool(found["passed"]), str(found["reason"])) if found["of"] == about else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write(of: Subject, what: Verdict) -> None:
    of.path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=of.path.parent, suffix=".new", delete=False) as file:
        file.write(json.dumps({"of": of._asdict(), **what._asdict()}, indent=1) + "\n")
    os.replace(file.name, of.path)  # whole, though two machines share the folder


def passed(device: torch.device, dims: tuple[int, int]) -> frozenset[tuple[tuple[int, int], torch.dtype]]:
    """These head dims with each dtype that has passed its trial."""
    every = ((dims, dtype) for dtype in (torch.bfloat16, torch.float16))
    return frozenset(one for one in every if (found := verdict(subject(device, *one))) and found.passed)


class Trial:
    """A trial under way; the last line that its command prints is the reason."""

    def __init__(self, of: Subject, command: list[str], seconds: float = LIMIT):
        self.of, self.seconds, self.end = of, seconds, time.monotonic() + seconds
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - as long as the trial
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def verdict(self, seconds: float) -> Verdict | None:
        """The verdict, which is recorded; None if the trial still runs after `seconds`."""
        try:
            status = self._process.wait(max(0.0, min(seconds, self.end - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() < self.end:
                return None
            self._process.kill()  # its GPU's driver ends what it had launched
            found = Verdict(False, f"not ended after {self.seconds:.0f} s")
        else:
            self._output.seek(0)
            lines = [line for line in self._output.read().splitlines() if line.strip()] or ["no word"]
            if status == NOT_TRIED:
                return Verdict(False, lines[-1])
            died = f"ended by signal {-status}, after: {lines[-1]}" if status < 0 else lines[-1]
            found = Verdict(status == 0, "" if status == 0 else died)
        try:
            write(self.of, found)
        except OSError as error:
            return Verdict(False, f"it cannot be recorded: {error}")
        return found


def trial(of: Subject, device: torch.device) -> Trial | None:
    """Starts one on that GPU; None where a verdict is recorded already."""
    if verdict(of) is not None:
        return None
    dims = map(str, of.head_dims)
    return Trial(of, [sys.executable, "-m", "wlb_titan.kernels.stress", str(device), *dims, of.dtype])
