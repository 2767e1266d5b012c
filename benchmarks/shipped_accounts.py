"""Traces the layers of the shipped files that need it, and keeps their accounts in the package.

    python benchmarks/shipped_accounts.py

Run it after a change of what layers keep, compute or send, or with another torch.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from predicted import BALANCED, PLAIN, ROOT

from wlb_titan.files import save
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator
from wlb_titan.runtime.models.load import load_config


def ship(file: Path) -> None:
    from wlb_titan.runtime import accounts

    loaded = load_config(file)
    told = loaded.told(loaded.job, [loaded.job.policy, PLAIN, *BALANCED])
    for shape, account in told.accounts.items():
        save(accounts.SHIPPED / f"{accounts.key_of(loaded.config, shape)}.json", asdict(account))
        print(f"{file.stem}: {shape}")


def main() -> None:
    use_cpu_without_accelerator()
    for file in sorted((ROOT / "train_configs").glob("*.toml")):
        ship(file)


if __name__ == "__main__":
    main()
