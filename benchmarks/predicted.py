"""The page docs/predicted.md: what big jobs are predicted to reach, and how that depends on the documents.

    python benchmarks/predicted.py
    python benchmarks/predicted.py --files train_configs/llama2_7b_128k.toml --steps 5 --page /tmp/page.md

For each file, each collection of documents and each of three policies the steps that `wlb-titan simulate`
predicts. The collections are this machine's Python files, prepared as `make train` does where they are not
yet, and distributions of lengths (`--lengths` of `simulate`). Writes benchmarks/results/cpu/predicted.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import numpy as np

from wlb_titan.corpus.prepare import PrepareSettings, prepare_corpus
from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.job import Policy
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.runtime.models.load import load_config
from wlb_titan.simulator.choice import Scenario

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "outputs" / "corpus"
RESULTS = ROOT / "benchmarks" / "results" / "cpu" / "predicted.json"
PAGE = ROOT / "docs" / "predicted.md"
FILES = [
    f"train_configs/{name}.toml"
    for name in ("llama2_550m_128k", "llama2_7b_128k", "llama2_30b_128k", "llama2_70b_128k")
] + ["train_configs/llama3_8b_128k.toml", "train_configs/qwen3_14b_32k.toml"]
PLAIN, *BALANCED = (Policy.parse(text) for text in ("plain", "wlb_lazy:hybrid:best", "slim:hybrid"))
PYTHON = "Python files"
COLLECTIONS = (PYTHON, "paper", "wlbllm", "prolong")
LONG = 65536  # tokens
HEAD = """# What big jobs are predicted to reach

Made by `python benchmarks/predicted.py`, {steps} steps each. No row was measured: all are predictions of the
simulator ([simulator.md](simulator.md)) for {cluster}.
To measure a job's first and last rank on one GPU: [rehearsal.md](rehearsal.md).

MFU counts the FLOPs that document masks leave, over that GPU's peak. FLOPs x and tokens x, a second, are over
the first row of a file. *Cut* is the share of tokens in pieces that begin in mid-document, *keys* what a
token attends to: policies that keep documents whole train more FLOPs in a token. Documents: this machine's
Python files, as `make train` prepares them.

| file | GPUs | policy | MFU | TFLOP/s a GPU | FLOPs x | tokens x | bubble | cut | keys |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""
LENGTHS = """
## By lengths of documents

FLOPs a second of `{first}` and of `{second}` over `{plain}` on the same documents: those
above, and three distributions of lengths ([simulator.md](simulator.md#lengths-without-a-corpus)). Tokens in
documents of 64K and more: {long}. One of them:
`wlb-titan simulate FILE --lengths NAME --policies {policies}`.

"""


def documents_of(collection: str) -> Documents:
    """As `wlb-titan simulate` reads a corpus, or draws a distribution."""
    if collection != PYTHON:
        return Documents(lengths=NAMED[collection].draw(), seed=None)
    return Documents(lengths=prepare_corpus(PrepareSettings(max_tokens=4_000_000), CORPUS).lengths)


def predicted(file: str, documents: Documents, steps: int) -> list[dict[str, Any]]:
    """Figures of each policy."""
    from wlb_titan.runtime.job import job_of, parallel_dims

    config = load_config(ROOT / file, []).config
    job = job_of(config, parallel_dims(config))
    scenario, rows = Scenario(job, documents), []
    for policy in (PLAIN, *BALANCED):
        plans = scenario.plans(policy, steps)
        found = scenario.simulate(policy, plans)
        tokens = sum(plan.tokens for plan in plans)
        rows.append(
            {
                "file": Path(file).stem,
                "gpus": job.degrees.ranks,
                "cluster": job.cluster.name,
                "policy": str(policy),
                "mfu": found.mfu,
                "flops_per_second": found.flops_per_second,
                "tokens_per_second": found.tokens_per_second,
                "bubble": found.bubble,
                "cut": sum(plan.tokens * plan.cut_share(job.window) for plan in plans) / tokens,
                "keys": sum(plan.tokens * plan.keys_per_token for plan in plans) / tokens,
            }
        )
    for row in rows:
        for key in ("flops", "tokens"):
            row[f"{key}_x"] = row[f"{key}_per_second"] / rows[0][f"{key}_per_second"]
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Lines of Markdown, one a policy."""
    lines = []
    for row in rows:
        cells = [row["file"], str(row["gpus"]), f"`{row['policy']}`", f"{row['mfu']:.1%}"]
        cells += [f"{row['flops_per_second'] / row['gpus'] / 1e12:,.4g}"]
        cells += [f"{row['flops_x']:.3f}", f"{row['tokens_x']:.3f}"]
        cells += [f"{row['bubble']:.1%}", f"{row['cut']:.1%}", f"{row['keys']:,.0f}"]
        lines.append(f"| {' | '.join(cells)} |\n")
    return "".join(lines)


def by_lengths(results: dict[str, list[list[dict[str, Any]]]]) -> str:
    """A table of Markdown: files by collections."""
    names = [name if name == PYTHON else f"`{name}`" for name in results]
    lines = [["file", *names], ["---"] * (1 + len(names))]
    for files in zip(*results.values(), strict=True):
        gains = [", ".join(f"{row['flops_x']:.2f}" for row in rows[1:]) for rows in files]
        lines.append([files[0][0]["file"], *gains])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def written(results: dict[str, Any]) -> str:
    """The page."""
    rows = [row for own in results["rows"][PYTHON] for row in own]
    shares = [f"{long:.0%} ({name})" for name, long in results["long"].items()]
    first, second = BALANCED
    return (
        HEAD.format(steps=results["steps"], cluster=rows[0]["cluster"])
        + table(rows)
        + LENGTHS.format(
            first=first,
            second=second,
            plain=PLAIN,
            long=", ".join(shares),
            policies=",".join(map(str, (PLAIN, first, second))),
        )
        + by_lengths(results["rows"])
    )


@click.command()
@click.option("--files", default=",".join(FILES), help="TOML files, with commas between them.")
@click.option("--steps", default=20, show_default=True)
@click.option("--page", type=click.Path(path_type=Path), default=PAGE)
@click.option("--output", type=click.Path(path_type=Path), default=RESULTS, help="JSON file for the rows.")
def main(files: str, steps: int, page: Path, output: Path) -> None:
    use_cpu_without_accelerator()
    results: dict[str, Any] = {"steps": steps, "rows": {}, "long": {}}
    for collection in COLLECTIONS:
        documents = documents_of(collection)
        lengths = np.asarray(documents.lengths)
        results["long"][collection] = float(lengths[lengths >= LONG].sum() / lengths.sum())
        results["rows"][collection] = []
        for file in files.split(","):
            rows = predicted(file, documents, steps)
            results["rows"][collection].append(rows)
            print(f"{collection}\n{table(rows)}", end="", flush=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    page.write_text(written(results), encoding="utf-8")


if __name__ == "__main__":
    main()
