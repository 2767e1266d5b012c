"""The page docs/measured.md: what big jobs reach, rehearsed on the GPU at hand, and predicted beside it.

    python benchmarks/measured.py                      # predicted, and rehearsed where there is a GPU
    python benchmarks/measured.py --files train_configs/llama2_7b_128k.toml
    python benchmarks/measured.py --device cpu --files train_configs/cpu_pipeline.toml --page /tmp/page.md

For each file and each of three policies, first `wlb-titan rehearse` of the first and the last rank, where
there is a device for it; then the step that is put together from them, and the same steps as `wlb-titan
simulate` predicts them. Without a device only the latter. All files train on one corpus. What was rehearsed
is kept in outputs/measured, a file for each file and policy, and not run again, so that the page can be made
in several sittings; delete the folder to begin anew.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import torch

from wlb_titan.commands.report.rehearse import figures
from wlb_titan.policies import Policy
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.runtime.models.load import load_config
from wlb_titan.simulator.scenario import Scenario

ROOT = Path(__file__).parents[1]
KEPT = Path("outputs/measured")
PAGE = ROOT / "docs" / "measured.md"
FILES = [
    f"train_configs/{name}.toml"
    for name in ("llama2_550m_128k", "llama2_7b_128k", "llama2_30b_128k", "llama2_70b_128k")
] + ["train_configs/llama3_8b_128k.toml", "train_configs/qwen3_14b_32k.toml"]
CORPUS = ["--wlb.corpus.path", "outputs/corpus", "--wlb.corpus.tokenizer", ""]
POLICIES = ("plain:per_sequence", "wlb_lazy:hybrid:best", "slim:hybrid")
HEAD = """# What big jobs reach

Made by `python benchmarks/measured.py` on {device}. A row is *rehearsed* ([rehearsal.md](rehearsal.md)) where
its first and last rank ran for real, and *predicted* ([simulator.md](simulator.md)) where they did not; the
predicted MFU of the same steps stands beside both. MFU counts the FLOPs that document masks leave, over the
peak of {cluster}; communication is that cluster's in all rows.
FLOPs x and tokens x are over the first row of a file. *Cut* is the share of tokens in pieces that begin in
mid-document, *keys* what a token attends to: policies that keep documents whole train more FLOPs in a token.
Documents: this machine's Python files, as `make train` prepares them.

| file | GPUs | policy | | MFU | predicted | TFLOP/s a GPU | FLOPs x | tokens x | bubble | cut | keys |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


def rehearsed(file: str, policy: str, steps: int, seconds: int, *, runs: bool) -> dict[str, Any] | None:
    """What `wlb-titan rehearse` says, before or, if it `runs` here, now; None where no rank came through."""
    output = KEPT / f"{Path(file).stem}-{policy.replace(':', '-')}.json"
    if not output.exists():
        if not runs:
            return None
        KEPT.mkdir(parents=True, exist_ok=True)
        words = [str(Path(sys.executable).parent / "wlb-titan"), "rehearse", file, "--policies", policy]
        words += ["--steps", str(steps), "--seconds", str(seconds), "--output", str(output), *CORPUS]
        result = subprocess.run(words, text=True, check=False, stdout=subprocess.PIPE)
        print(result.stdout, flush=True)
        if not output.exists():
            return None
    (one,) = json.loads(output.read_text())["policies"]
    return dict(one) if one["rehearsed"] else None


def row(file: str, policy: str, steps: int, ran: dict[str, Any] | None) -> dict[str, Any]:
    """Figures of one policy."""
    from wlb_titan.runtime.data.corpus import training_documents
    from wlb_titan.runtime.job import job_of, parallel_dims

    config = load_config(ROOT / file, CORPUS).config
    documents = training_documents(config.wlb)
    job = job_of(config, parallel_dims(config))
    scenario = Scenario(job, documents)
    asked = Policy.parse(policy)
    plans = scenario.plans(asked, steps if ran is None else len(ran["rehearsed"]["seconds"]))
    predicted = figures(scenario.simulate(asked, plans))
    tokens = sum(plan.tokens for plan in plans)
    return {
        "file": Path(file).stem,
        "gpus": job.degrees.ranks,
        "cluster": job.cluster.name,
        "policy": policy,
        "device": ran and ran["ranks"][0]["device"],
        "predicted": ran["predicted"] if ran else predicted,
        "rehearsed": ran and ran["rehearsed"],
        "cut": sum(plan.tokens * plan.cut_share(job.window) for plan in plans) / tokens,
        "keys": sum(plan.tokens * plan.keys_per_token for plan in plans) / tokens,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Lines of Markdown."""
    lines = []
    first: dict[str, dict[str, Any]] = {}
    for one in rows:
        own = one["rehearsed"] or one["predicted"]
        kind = "rehearsed" if one["rehearsed"] else "predicted"
        # A ratio is of two figures of one kind.
        base = first.setdefault(one["file"], one)
        base = (base["rehearsed"] if one["rehearsed"] else base["predicted"]) or own
        cells = [one["file"], str(one["gpus"]), f"`{one['policy']}`", kind, f"{own['mfu']:.1%}"]
        cells += [f"{one['predicted']['mfu']:.1%}" if one["rehearsed"] else "–"]
        cells += [f"{own['flops_per_second'] / one['gpus'] / 1e12:,.4g}"]
        cells += [f"{own[key] / base[key]:.3f}" for key in ("flops_per_second", "tokens_per_second")]
        cells += [f"{own['bubble']:.1%}", f"{one['cut']:.1%}", f"{one['keys']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


@click.command()
@click.option("--files", default=",".join(FILES), help="TOML files, with commas between them.")
@click.option("--policies", default=",".join(POLICIES), help="The first is the baseline.")
@click.option("--device", type=click.Choice(["auto", "cpu", "none"]), default="auto", show_default=True)
@click.option("--steps", default=20, show_default=True, help="Where nothing is rehearsed.")
@click.option("--rehearsed-steps", default=3, show_default=True)
@click.option("--seconds", default=300, show_default=True, help="Limit of a rank.")
@click.option("--page", type=click.Path(path_type=Path), default=PAGE)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the rows.")
def main(
    files: str,
    policies: str,
    device: str,
    steps: int,
    rehearsed_steps: int,
    seconds: int,
    page: Path,
    output: Path | None,
) -> None:
    use_cpu_without_accelerator()
    runs = device == "cpu" or (device == "auto" and torch.cuda.is_available())
    rows = []
    for file in files.split(","):
        for policy in policies.split(","):
            ran = rehearsed(file, policy, rehearsed_steps, seconds, runs=runs)
            rows.append(row(file, policy, steps, ran))
            print(table(rows[-1:]), end="", flush=True)
    devices = {one["device"] for one in rows if one["device"]}
    name = ", ".join(f"one {device}" for device in sorted(devices)) or "a machine without a GPU"
    page.parent.mkdir(parents=True, exist_ok=True)
    text = HEAD.format(device=name, cluster=rows[0]["cluster"])
    page.write_text(text + table(rows), encoding="utf-8")
    if output is not None:
        output.write_text(json.dumps({"device": name, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
