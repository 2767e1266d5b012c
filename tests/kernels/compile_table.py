"""Registers, spills and shared memory of all configurations that ship, compiled for sm_90 without a GPU.

python tests/kernels/compile_table.py
PYTHONPATH=.venv/triton-3.6 python tests/kernels/compile_table.py    # after make test-triton36
"""

from crosscompile import compile_all
from test_compile import HEAD_DIMS, gluon_launches, launches
from wlb_titan.kernels.implementations import GLUON_HEAD_DIMS
from wlb_titan.kernels.triton_launch import choose


def main() -> None:
    wanted = {}
    for dims in HEAD_DIMS:
        for which, launch in launches(dims, 8).items():
            config = getattr(choose(dims, tma=True), which)
            name = " / ".join(map(str, dict.fromkeys(dims)))
            wanted[f"triton {which} | {name} | {config.block_m} x {config.block_n}"] = launch
    for dim in GLUON_HEAD_DIMS:
        for which, launch in gluon_launches(dim).items():
            name, rows = ("forward", 128) if which == "forward" else (f"backward, {which}", 64)
            wanted[f"gluon {name} | {dim} | {rows} x 128"] = launch
    print("| kernel | D / Dv | tile | registers | spilled bytes | shared KiB |", "|" + " --- |" * 6, sep="\n")
    for name, report in zip(wanted, compile_all(list(wanted.values())), strict=True):
        assert not report.error and not report.warnings and not report.mismatches, (name, report)
        print(f"| {name} | {report.registers} | {report.spills} | {report.shared // 1024} |")


if __name__ == "__main__":
    main()
