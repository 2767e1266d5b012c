"""What packs of their own for backward passes are worth, in simulation.

    python benchmarks/asymmetric_simulated.py --output benchmarks/results/cpu/asymmetric_simulated.json

WLB-LLM's 7B-128K job (TP 8, CP 2, PP 4, 1F1B, 64 H100; attention at FlashAttention-3's published speed) with
4 and 16 context windows a step under `slim`, with M MicroPacks: under selective and under full activation
checkpointing, and with the asymmetric partition, which takes the place of full checkpointing.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "reproduce"))

from paper import Setting, configuration

from wlb_titan.job import Policy
from wlb_titan.packing.slim.slim import Slim
from wlb_titan.simulator.choice import Scenario

GIB = 2**30
SLIM = Policy("slim", "adaptive")
VARIANTS = (("selective", False), ("full", False), ("full", True))


@dataclass
class Row:
    """`slim` with M packs; seconds of a step, mean, and its bubble and the fullest rank's peak by term."""

    windows: int
    micropacks: int
    checkpointing: str
    asymmetric: bool
    seconds: float
    bubble: float
    imbalance: float
    peak_gib: float
    in_flight_gib: float
    cache_gib: float
    at_hand_gib: float


def row(one: Scenario, micropacks: int, checkpointing: str, asymmetric: bool, steps: int) -> Row:
    packing = Slim.Config(micropacks=micropacks, slack=2, cost_model="simulated", asymmetric=asymmetric)
    memory = replace(one.job.memory, checkpointing=checkpointing)
    job = replace(one.job, packing=packing, memory=memory)
    scenario = one.on(job)
    plans = scenario.plans(SLIM, steps)
    prediction = scenario.simulate(SLIM, plans)
    peak = prediction.peak_memory
    return Row(
        windows=job.micro_batches,
        micropacks=micropacks,
        checkpointing=checkpointing,
        asymmetric=asymmetric,
        seconds=float(prediction.seconds.mean()),
        bubble=prediction.bubble,
        imbalance=sum(plan.imbalance for plan in plans) / steps,
        peak_gib=peak.total / GIB,
        in_flight_gib=peak.activations / GIB,
        cache_gib=peak.cache / GIB,
        at_hand_gib=(peak.backward + peak.loss) / GIB,
    )


@click.command()
@click.option("--steps", default=10, show_default=True, help="Simulated steps of each job.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file for the results.")
def main(steps: int, output: Path | None) -> None:
    rows = []
    table = Table(
        *("N", "M", "checkpointing", "step, s", "bubble", "imbalance", "peak GiB"),
        *("in flight", "cache", "at hand"),
        title="7B-128K under slim, simulated, on H100",
    )
    for windows, packs in ((4, (16, 32, 64, 128)), (16, (32, 64, 128))):
        one = configuration(Setting("FA3", 1, 0.0), "7B-128K", micro_batches=windows)
        one = one.on(replace(one.job, schedule="1F1B"))
        for micropacks in packs:
            for checkpointing, asymmetric in VARIANTS:
                rows.append(row(one, micropacks, checkpointing, asymmetric, steps))
                last = rows[-1]
                table.add_row(
                    *(str(windows), str(micropacks), checkpointing + ", asymmetric" * asymmetric),
                    *(f"{last.seconds:.4f}", f"{last.bubble:.2%}", f"{last.imbalance:.3f}"),
                    *(f"{last.peak_gib:.1f}", f"{last.in_flight_gib:.1f}"),
                    *(f"{last.cache_gib:.1f}", f"{last.at_hand_gib:.1f}"),
                )
    Console(width=120).print(table)
    if output is not None:
        record = {"settings": {"steps": steps}, "rows": [asdict(one) for one in rows]}
        output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
