"""Registers, spills and shared memory of every shipped configuration, compiled for sm_90, as a table.

python tests/kernels/compile_table.py 3.9.json                                     # compiles, no GPU needed
PYTHONPATH=.venv/triton-3.6 python tests/kernels/compile_table.py 3.6.json         # make test-triton36
python tests/kernels/compile_table.py --table 3.6.json 3.9.json
"""

import json
import sys
from pathlib import Path

import pytest
from crosscompile import compile_all
from test_compile import HEAD_DIMS, gluon_launches, launches
from wlb_titan.kernels import gluon_launch
from wlb_titan.kernels.implementations import GLUON_HEAD_DIMS
from wlb_titan.kernels.triton_launch import choose


def figures() -> dict[str, list[int]]:
    """By kernel: registers, spilled bytes, KiB of shared memory."""
    wanted = {}
    for dims in HEAD_DIMS:
        for which, launch in launches(dims, 8).items():
            config = getattr(choose(dims, tma=True), which)
            shape = f"{config.block_m} x {config.block_n}"
            name = " / ".join(map(str, dict.fromkeys(dims)))
            wanted[f"triton {which}|{name}|{shape}"] = launch
    with pytest.MonkeyPatch.context() as patch:
        for dim in GLUON_HEAD_DIMS:
            forward, split = gluon_launches(dim, 8, patch)
            packed = gluon_launches(dim, 8, patch, units=1)[1]
            with patch.context() as heads_first:
                heads_first.setattr(gluon_launch, "HEADS_FIRST", 0)
                one_by_one = gluon_launches(dim, 8, heads_first, units=1)[1]
            wanted[f"gluon forward|{dim}|128 x 128"] = forward
            wanted[f"gluon backward, packed|{dim}|64 x 128"] = packed
            wanted[f"gluon backward, split|{dim}|64 x 128"] = split
            wanted[f"gluon backward, heads first|{dim}|64 x 128"] = one_by_one
    found = {}
    for name, report in zip(wanted, compile_all(list(wanted.values())), strict=True):
        assert not report.error and not report.warnings and not report.mismatches, (name, report)
        found[name] = [report.registers, report.spills, report.shared // 1024]
    return found


def table(files: list[str]) -> str:
    """Markdown, with the figures of the files side by side."""
    versions = [json.loads(Path(file).read_text()) for file in files]
    lines = [
        "| kernel | D / Dv | tile | registers | spilled bytes | shared KiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in versions[0]:
        cells = [
            " / ".join(map(str, dict.fromkeys(x))) for x in zip(*(v[name] for v in versions), strict=True)
        ]
        lines.append("| " + " | ".join([*name.split("|"), *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1] == "--table":
        print(table(sys.argv[2:]))
    else:
        Path(sys.argv[1]).write_text(json.dumps(figures(), indent=1) + "\n")
