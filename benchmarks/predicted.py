"""The page docs/predicted.md: what big jobs are predicted to reach, and how that depends on the documents.

    python benchmarks/predicted.py

For each file, each collection of documents and each of three policies the steps that `wlb-titan simulate`
predicts, and for each file on the first collection what its `--search` finds, however long that takes. The
collections are this machine's Python files, prepared as `make train` does where they are not
yet, and distributions of lengths (`--lengths` of `simulate`). The rows are written to
benchmarks/results/cpu/predicted.json and into the gaps of benchmarks/predicted.md.in, which is the page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from common import formatted, save, show, table

from wlb_titan.documents import Documents
from wlb_titan.documents.lengths import NAMED
from wlb_titan.job import Job, Policy
from wlb_titan.prepare.prepare import PrepareSettings, prepare_corpus
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.runtime.models.load import load_config
from wlb_titan.simulator.choice import Scenario
from wlb_titan.simulator.search import pipeline_words, search

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "outputs" / "corpus"
PAGE = ROOT / "docs" / "predicted.md"
FILES = (
    *(f"llama2_{size}_128k" for size in ("550m", "7b", "30b", "70b")),
    *("llama3_8b_128k", "qwen3_14b_32k"),
)
PLAIN, *BALANCED = (Policy.parse(text) for text in ("plain", "wlb_lazy/hybrid/best", "slim/hybrid"))
PYTHON = "Python files"
COLLECTIONS = (PYTHON, "paper", "wlbllm", "prolong")
COLUMNS = {
    "file": "{file}",
    "GPUs": "{gpus}",
    "policy": "`{policy}`",
    "MFU": "{mfu:.1%}",
    "TFLOP/s a GPU": "{tflops_a_gpu:,.4g}",
    "FLOPs x": "{flops_x:.3f}",
    "tokens x": "{tokens_x:.3f}",
    "bubble": "{bubble:.1%}",
    "cut": "{cut:.1%}",
    "keys": "{keys:,.0f}",
}
SEARCHED = {
    "file": "{file}",
    "GPUs": "{gpus}",
    "of the file": "{configured}",
    "searched": "{degrees}, {schedule}",
    "MFU": "{mfu:.1%}",
    "FLOPs x": "{flops_x:.3f}",
    "tokens x": "{tokens_x:.3f}",
}
LONG = 65536  # tokens
STEPS = 20


def documents_of(collection: str) -> Documents:
    """As `wlb-titan simulate` reads a corpus, or draws a distribution."""
    if collection != PYTHON:
        return Documents(lengths=NAMED[collection].draw(), seed=None)
    return Documents(lengths=prepare_corpus(PrepareSettings(max_tokens=4_000_000), CORPUS).lengths)


def job_of_file(file: str, *words: str) -> Job:
    return load_config(ROOT / "train_configs" / f"{file}.toml", words).job


def predicted(file: str, documents: Documents) -> list[dict[str, Any]]:
    """Figures of each policy."""
    job = job_of_file(file)
    scenario, rows = Scenario(job, documents), []
    for policy in (PLAIN, *BALANCED):
        plans = scenario.plans(policy, STEPS)
        found = scenario.simulate(policy, plans)
        tokens = sum(plan.tokens for plan in plans)
        rows.append(
            {
                "file": file,
                "gpus": job.degrees.ranks,
                "cluster": job.cluster.name,
                "policy": str(policy),
                "mfu": found.mfu,
                "tflops_a_gpu": found.flops_per_second / job.degrees.ranks / 1e12,
                "tokens_per_second": found.tokens_per_second,
                "bubble": found.bubble,
                "cut": sum(plan.tokens * plan.cut_share(job.window) for plan in plans) / tokens,
                "keys": sum(plan.tokens * plan.keys_per_token for plan in plans) / tokens,
            }
        )
    for row in rows:
        for name, key in (("flops_x", "tflops_a_gpu"), ("tokens_x", "tokens_per_second")):
            row[name] = row[key] / rows[0][key]
    return rows


def searched(file: str, documents: Documents, plain: dict[str, Any]) -> dict[str, Any]:
    """The best degrees and schedule of as many GPUs under the first of the balanced policies."""
    loaded = load_config(ROOT / "train_configs" / f"{file}.toml")
    scenario, gpus = Scenario(loaded.job, documents), loaded.job.degrees.ranks
    best = search(scenario, gpus, [BALANCED[0]], STEPS, told=loaded.told).found[0]
    return {
        "file": file,
        "gpus": gpus,
        "configured": str(loaded.job.degrees),
        "degrees": str(best.job.degrees),
        "schedule": pipeline_words(best.job),
        "mfu": best.mfu,
        "flops_x": best.flops_per_second / gpus / 1e12 / plain["tflops_a_gpu"],
        "tokens_x": best.tokens_per_second / plain["tokens_per_second"],
    }


def by_lengths(results: dict[str, list[list[dict[str, Any]]]]) -> str:
    """A table of Markdown: files by collections."""
    names = [name if name == PYTHON else f"`{name}`" for name in results]
    lines = []
    for files in zip(*results.values(), strict=True):
        gains = [", ".join(f"{row['flops_x']:.2f}" for row in rows[1:]) for rows in files]
        lines.append([files[0][0]["file"], *gains])
    return table(["file", *names], lines)


def page(results: dict[str, Any]) -> str:
    """predicted.md.in with its gaps filled."""
    rows = [row for own in results["rows"][PYTHON] for row in own]
    first, second = BALANCED
    return (
        Path(__file__)
        .with_suffix(".md.in")
        .read_text()
        .format(
            steps=results["steps"],
            cluster=rows[0]["cluster"],
            rows=formatted(COLUMNS, rows),
            searched=formatted(SEARCHED, results["searched"]),
            first=first,
            second=second,
            plain=PLAIN,
            long=", ".join(f"{long:.0%} ({name})" for name, long in results["long"].items()),
            policies=",".join(map(str, (PLAIN, first, second))),
            by_lengths=by_lengths(results["rows"]),
        )
    )


def main() -> None:
    use_cpu_without_accelerator()
    results: dict[str, Any] = {"steps": STEPS, "rows": {}, "long": {}}
    for collection in COLLECTIONS:
        documents = documents_of(collection)
        lengths = np.asarray(documents.lengths)
        results["long"][collection] = float(lengths[lengths >= LONG].sum() / lengths.sum())
        results["rows"][collection] = []
        for file in FILES:
            print(f"\n{collection}\n")
            results["rows"][collection].append(show(COLUMNS, predicted(file, documents)))
        if collection == PYTHON:
            firsts = zip(FILES, results["rows"][PYTHON], strict=True)
            results["searched"] = show(SEARCHED, (searched(file, documents, own[0]) for file, own in firsts))
    save("predicted", results)
    PAGE.write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
