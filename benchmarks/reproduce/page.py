"""docs/reproduction.md: the papers' figures, ours as ranges, and why they differ."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pictures import fixed_4d

HERE = Path(__file__).parent
WHY = tomllib.loads((HERE / "why.toml").read_text(encoding="utf-8"))
"""Why our figures are others, by section of the page."""
STATED = tomllib.loads((HERE / "stated.toml").read_text(encoding="utf-8"))
"""What the papers state that stands beside ours: `text`, `value` and `calibrates`, by the keys of `OURS`."""
DOCS = Path(__file__).parents[2] / "docs"
BEST = "wlb_lazy:hybrid:best"
SLIM = "slim:hybrid"
Results = dict[str, Any]


def write_page(results: Results) -> Path:
    """Writes the page from the results of run.py; its path."""
    parts = [
        _head(results),
        _settings(results),
        _overview(results),
        _figure_3(results),
        _table_2(results),
        _figure_12(results),
        _other_lengths(results),
        _figures_13_to_15(results),
        _others(results),
        _scale(results),
    ]
    page = DOCS / "reproduction.md"
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return page


def mean(figure: dict[str, Any], key: str | None, window: str = "") -> float:
    """Mean speedup over the configurations whose name ends with `window`; None is Fixed-4D."""
    rows = [row for name, row in figure.items() if name.endswith(window)]
    return float(np.mean([fixed_4d(row) if key is None else row[key] for row in rows]))


WLB = "wlb:adaptive"
OURS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "step_share": lambda s: s["figure_13"][f"{WLB} step_seconds"],
    "original_imbalance": lambda s: s["table_2"][0]["imbalance"],
    "wlb_mean": lambda s: mean(s["figure_12"], WLB),
    "wlb_64k": lambda s: mean(s["figure_12"], WLB, "-64K"),
    "wlb_128k": lambda s: mean(s["figure_12"], WLB, "-128K"),
    "fixed_mean": lambda s: mean(s["figure_12"], None),
    "wlb_over_fixed": lambda s: mean(s["figure_12"], WLB) / mean(s["figure_12"], None),
    "breakdown_per_document": lambda s: s["figure_13"]["plain:per_document"],
    "breakdown_adaptive": lambda s: s["figure_13"]["plain:adaptive"],
    "breakdown_packing": lambda s: s["figure_13"]["wlb:per_sequence"],
    "breakdown_both": lambda s: s["figure_13"][WLB],
    "window_160k": lambda s: s["figure_14"]["160K"][WLB],
    "large_job_slowest": lambda s: [
        s["large_job"][key] for key in ("slowest_gpu_attention_of_all_steps", "slowest_gpu_attention")
    ],
    "layer_64k": lambda s: s["figure_15"]["64K"]["per_document"],
    "layer_128k": lambda s: s["figure_15"]["128K"]["per_document"],
    "layer_adaptive_over_sequence": lambda s: s["figure_15"]["128K"]["adaptive"],
    "layer_adaptive_over_document": lambda s: s["figure_15"]["128K"]["adaptive_over_per_document"],
    "delay": lambda s: s["delay"],
}
"""Our figure under one setting; a list where it is a range."""


def span(results: Results, value: Callable[[dict[str, Any]], Any]) -> tuple[float, float]:
    """The least and the most over all settings."""
    values = np.concatenate([np.ravel(value(setting)) for setting in results["settings"].values()])
    return values.min().item(), values.max().item()


def _range(low: float, high: float, digits: int = 2) -> str:
    texts = f"{low:.{digits}f}", f"{high:.{digits}f}"
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def deviation(low: float, high: float, theirs: float) -> str:
    """Of the nearer end over theirs, less 1; "within" where theirs lies between, to two digits."""
    if round(low, 2) <= theirs <= round(high, 2):
        return "within"
    return f"{(low if low > theirs else high) / theirs - 1:+.0%}"


def _table(headings: list[str], rows: list[list[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _head(results: Results) -> str:
    setup = results["setup"]
    return f"""# The paper's tables and figures in simulation

`python benchmarks/reproduce/run.py` writes this page, `docs/reproduction/*.svg` and
`benchmarks/results/cpu/reproduction.json`. Nothing here was measured on a GPU: the paper's 32 to 256 H100s are
simulated ([simulator.md](simulator.md)), {setup["steps"]} steps for each bar.

The simulation is set up as the papers state. Settings that they leave open have a range, and every result is a range over their
{len(results["settings"])} combinations. "Deviation" is that of the range's nearer end; "within" means that the paper's figure lies
in the range."""


def _settings(results: Results) -> str:
    rows = []
    for name, found in results["settings"].items():
        setting = found["setting"]
        rows.append(
            [
                name,
                f"{setting['linear_flops'] / 1e12:.0f}",
                f"{setting['slowdown']:.2f}",
                f"{OURS['step_share'](found):.2f}",
                f"{OURS['original_imbalance'](found):.2f}",
                f"{OURS['wlb_mean'](found):.3f}",
                f"{OURS['breakdown_both'](found):.3f}",
            ]
        )
    headings = [
        "setting (v: stages a rank)",
        "matrices, TFLOP/s",
        "attention, times FA",
        "step, s",
        "imbalance",
        "mean of Figure 12",
        "7B-128K",
    ]
    return f"""## What is assumed

Not stated, and therefore a range: the attention kernel (FlashAttention-2 or -3 by their published dense and varlen times in
`benchmarks/reproduce/published_attention.py`, or slower, as Table 2 has it), stages a rank (2 or 4), the share of tensor
parallelism's communication that overlap does not hide (none or half), the steps that Figures 1 and 4 accumulate (one or four), and
the rate of matrix products (that with which a step of 7B-128K takes 3.08 s, within 250 to 750 TFLOP/s; or 600, published).

{_table(headings, rows)}

The paper has a step of 3.08 s (20 ms of packing are 0.65 % of it), an imbalance of 1.44, a mean of 1.23, and 1.33 for
7B-128K. For every setting the rate of matrix products is chosen so that the step is met. In the settings "as in Table 2" the
time of attention, a multiple of FlashAttention-2's published one, is chosen so that the imbalance is met.

{WHY["settings"]}"""


def _overview(results: Results) -> str:
    rows = []
    for key, value in OURS.items():
        stated, theirs = STATED[key], STATED[key]["value"]
        low, high = span(results, value)
        digits = 3 if round(theirs, 2) != theirs else 2
        used = " (calibrates)" if stated.get("calibrates") else ""
        rows.append(
            [
                stated["text"] + used,
                f"{theirs:.{digits}f}",
                _range(low, high, digits),
                deviation(low, high, theirs),
            ]
        )
    return f"""## Overview

{_table(["figure", "paper", "ours", "deviation"], rows)}

{WHY["overview"]}"""


def _figure_3(results: Results) -> str:
    carried, dropped = results["figure_3"]["carried"], results["figure_3"]["dropped"]
    lengths = results["setup"]["lengths"]
    return f"""## Figure 3: lengths

Log-normal, median {lengths["median"]:,.0f} tokens, sigma {lengths["sigma"]}: `--lengths paper` of `wlb-titan plan` and
`simulate`. Where a window's end cuts a document, the rest begins the next window.

| 128K windows | paper | ours | were the rest lost |
| --- | --- | --- | --- |
| average length by position, largest over least | 1.4 | {carried["position_ratio"]:.2f} | {dropped["position_ratio"]:.1f} |
| its peak, from 0 at the beginning to 1 | the middle | {carried["position_peak"]:.2f} | {dropped["position_peak"]:.2f} |
| tokens in documents below half a window | above 75 % | {carried["below_half"]:.0%} | {dropped["below_half"]:.0%} |
| tokens in documents of a full window | some | {carried["full_windows"]:.1%} | {dropped["full_windows"]:.1%} |

![Figure 3](reproduction/figure_03.svg)

{WHY["figure_3"]}"""


def _table_2(results: Results) -> str:
    rows = []
    for place, row in enumerate(next(iter(results["settings"].values()))["table_2"]):

        def column(key: str, at: int = place) -> tuple[float, float]:
            return span(results, lambda s: s["table_2"][at][key])

        low, high = column("imbalance")
        given = row["theirs"] is not None
        rows.append(
            [
                row["method"],
                f"{row['theirs']:.2f}" if given else "",
                _range(low, high),
                deviation(low, high, row["theirs"]) if given else "",
                f"{row['their_ms']:,}" if given else "",
                _range(*column("ms"), digits=0),
                _range(*column("delay")),
            ]
        )
    headings = ["method", "paper", "ours", "deviation", "paper, ms", "ours, ms", "delay"]
    return f"""## Table 2: packing, 7B-128K

Imbalance of predicted forward latency; N = 4.

{_table(headings, rows)}

{WHY["table_2"]}"""


def _figure_12(results: Results) -> str:
    names = next(iter(results["settings"].values()))["figure_12"]
    columns: list[tuple[str, Callable[[dict[str, Any]], float]]] = [
        ("Plain-4D, s", lambda row: row["plain"]["step_seconds"]),
        ("Fixed-4D", fixed_4d),
        ("WLB-LLM", lambda row: row[WLB]),
        ("wlb_lazy, hybrid", lambda row: row["wlb_lazy:hybrid"]),
        ("and best order", lambda row: row[BEST]),
        ("slim, hybrid", lambda row: row[SLIM]),
    ]
    rows = [
        [name, *(_range(*span(results, lambda s, v=v, n=name: v(s["figure_12"][n]))) for _, v in columns)]
        for name in names
    ]
    rows.append(
        [
            "**mean**",
            "",
            *(
                f"**{_range(*span(results, lambda s, k=k: mean(s['figure_12'], k)))}**"
                for k in (None, WLB, "wlb_lazy:hybrid", BEST, SLIM)
            ),
        ]
    )
    rows.append(["paper", "", "1.03", "1.23", "", "", ""])
    return f"""## Figure 12: all configurations, and the gain of our additions

Speedup over Plain-4D. The last three columns are this project's: `wlb_lazy` packing with `hybrid` sharding, then in the
`best` order of micro-batches, and documents in slices ([slimpack.md](slimpack.md)).

{_table(["", *(name for name, _ in columns)], rows)}

![Figure 12](reproduction/figure_12.svg)

{WHY["figure_12"]}"""


def _other_lengths(results: Results) -> str:
    rows = [
        [
            f"`{name}`",
            f"{found['long']:.0%}",
            *(f"{found[key]:.2f}" for key in (WLB, BEST, SLIM)),
        ]
        for name, found in results["other_lengths"].items()
    ]
    return f"""## Figure 12 on other lengths

The paper says little about its data, and the gain depends on it. [DistCA](https://github.com/hao-ai-lab/DistCA), which has an
open implementation of WLB-LLM as its baseline, takes lengths with fewer long documents
([simulator.md](simulator.md#lengths-without-a-corpus)). 7B-128K, speedup over Plain-4D on the same lengths, under one setting,
{list(results["settings"])[results["setup"]["one"]]} (`python benchmarks/reproduce/run.py --only other_lengths`):

{_table(["lengths", "tokens in documents of 64K and more", "WLB-LLM", "wlb_lazy, hybrid, best", "slim, hybrid"], rows)}

[predicted.md](predicted.md#by-lengths-of-documents) has six files of `train_configs` on the same lengths."""


def _figures_13_to_15(results: Results) -> str:
    f14 = next(iter(results["settings"].values()))["figure_14"]
    windows = [
        [
            name,
            *(
                _range(*span(results, lambda s, v=v, n=name: v(s["figure_14"][n])))
                for v in (fixed_4d, lambda row: row[WLB], lambda row: row[BEST])
            ),
        ]
        for name in f14
    ]
    keys = ("per_document", "adaptive", "adaptive_over_per_document")
    layers = [
        [
            name,
            *(_range(*span(results, lambda s, k=k, n=name: s["figure_15"][n][k]), digits=3) for k in keys),
            " to ".join(
                f"{end:.0%}"
                for end in span(results, lambda s, n=name: s["figure_15"][n]["per_sequence_is_faster"])
            ),
        ]
        for name in ("64K", "128K")
    ]
    return f"""## Figure 14: context windows

7B at the degrees of 7B-128K. The paper's curve rises to 1.40 at 160K.

{_table(["window", "Fixed-4D", "WLB-LLM", "wlb_lazy, hybrid, best"], windows)}

![Figure 14](reproduction/figure_14.svg)

## Figure 15: sharding of one layer

7B, CP 4, forward and backward with communication; speedup over per-sequence sharding.

{_table(["window", "per-document", "adaptive", "adaptive over per-document", "per-sequence is faster"], layers)}

{WHY["figure_15"]}"""


def _others(results: Results) -> str:
    one = results["settings"][list(results["settings"])[results["setup"]["one"]]]
    f10, f6 = one["figure_10"], results["figure_6"]
    at = dict(zip(f10["q_len"], f10["seconds"], strict=True))
    rates = dict(zip(f10["q_len"], f10["tflops"], strict=True))
    imbalance = ", ".join(
        f"{value:.2f} ({window})" for window, value in zip(f6["window"], f6["imbalance"], strict=True)
    )
    slowest = {
        key: _range(*span(results, lambda s, k=key: s["large_job"][k]))
        for key in (
            "slowest_gpu_attention",
            "slowest_gpu_attention_of_all_steps",
            "slowest_gpu_computation",
            "data_parallel_attention",
            "context_parallel_attention",
        )
    }
    crossing = span(results, lambda s: s["figure_7"]["equal_at"])
    return f"""## Figures 1 and 4: an 8K-GPU job

Llama 3 405B, (TP, CP, PP, DP) = (8, 16, 16, 4), 16 micro-batches of 128K a replica, mean of single steps:

| over the others | times as long |
| --- | --- |
| attention of the slowest GPU (paper: 1.44, accumulated) | {slowest["slowest_gpu_attention"]} |
| the same in the sum of {one["large_job"]["steps"]} steps | {slowest["slowest_gpu_attention_of_all_steps"]} |
| all computation of the slowest GPU | {slowest["slowest_gpu_computation"]} |
| attention of the slowest replica | {slowest["data_parallel_attention"]} |
| attention of a replica's slowest context-parallel rank, over the mean | {slowest["context_parallel_attention"]} |

![Figure 4](reproduction/figure_04.svg)

{WHY["large_job"]}

## Figures 6 and 16: packing over more global batches, and loss

Imbalance of attention (Max_Attn / Avg_Attn) by the number of global batches packed together: {imbalance}.

{_loss(results["loss_curves"])}

## Figure 7: attention against everything else

7B-128K: a document's attention takes longer than all its other operations from a length on that is {crossing[0]:,} to
{crossing[1]:,} tokens, by setting.

![Figure 7](reproduction/figure_07.svg)

## Figures 9 and 10: the kernel model

512 segments on 4,096 keys take {at[16] * 1e3:.2f} ms with 16 queries each, {at[128] * 1e3:.2f} ms with 128 and
{at[256] * 1e3:.2f} ms with 256: flat up to a tile and then twice, as in the paper. Achieved TFLOP/s are
{rates[16]:.0f}, {rates[128]:.0f} and {rates[256]:.0f}. {WHY["figure_10"]}

![Figure 10](reproduction/figure_10.svg)"""


def _loss(curves: dict[str, Any] | None) -> str:
    if curves is None:
        return "The loss is measured by training: `benchmarks/loss_curves.py`, which has no result here."
    rows = [
        [policy, f"{row['mean']:.4f}", f"{row['minus_plain']:+.4f}", f"{row['standard_error']:.4f}"]
        for policy, row in curves["validation"].items()
    ]
    settings = curves["settings"]
    return (
        f"Loss, measured by training (`benchmarks/loss_curves.py`): a model of 1.8 million weights, windows of "
        f"{settings['window']:,} tokens, {settings['steps']:,} steps of {settings['micro_batches']} micro-batches, "
        f"{settings['seeds']} seeds, loss on the same held-out documents.\n\n"
        + _table(["policy", "validation loss", "minus plain", "standard error of the difference"], rows)
        + "\n\n[packing.md](packing.md#loss) discusses this."
    )


def _scale(results: Results) -> str:
    rows = []
    for row in results["scale"]:
        for policy in (WLB, "wlb_lazy:hybrid"):
            one = row[policy]
            rows.append(
                [
                    f"{row['gpus']:,}",
                    f"{row['micro_batches']:,}",
                    policy,
                    f"{one['speedup']:.3f}",
                    f"{one['step_seconds']:.1f}",
                    f"{one['planning_seconds']:.2f}",
                    f"{one['plan_mib']:.1f}",
                    f"{one['simulating_seconds']:.2f}",
                ]
            )
    speed = results["speed"]
    headings = ["GPUs", "N", "policy", "speedup", "step, s", "planning, s", "plan, MiB", "simulating, s"]
    return f"""## On paper: 1K, 8K and 100K GPUs

70B, 128K windows, TP 8 x CP 16, 16 micro-batches a replica; speedup over plain per-sequence. Under one setting:
{list(results["settings"])[results["setup"]["one"]]}.

{_table(headings, rows)}

Planning and simulating are processor seconds a step, tuning of thresholds included. Among many micro-batches there is
always one full window, and everyone waits for it, so the unbalanced baseline is at its worst from a few hundred
micro-batches on. (At 100K GPUs a single step was simulated.) In a job every rank plans the packing of the whole job and the
sharding of its own replica alone ([architecture.md](architecture.md)); here one process plans all of it.

Speed: 100 steps of 70B-128K are planned in {speed["planning_seconds"]:.1f} processor seconds and simulated in
{speed["simulating_seconds"]:.1f}, after {speed["tuning_seconds"]:.1f} in which Algorithm 1's thresholds are tuned."""
