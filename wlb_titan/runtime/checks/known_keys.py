"""Writes what `wlb_titan.config.known` knows: `python -m wlb_titan.runtime.checks.known_keys`.

To be run after an upgrade of torchtitan or a change of a configuration class."""

from __future__ import annotations

import json
from pathlib import Path

import wlb_titan.config
from wlb_titan.config.known import FILE_NAME, keys_of, without_ours
from wlb_titan.config.load import LOCKED
from wlb_titan.runtime.cpu_device import use_cpu_without_accelerator


def text() -> str:
    """The file's content: the keys that all bases of the registry share, without [wlb]."""
    use_cpu_without_accelerator()
    from wlb_titan.runtime.models.registry import BASES

    found = {name: without_ours(keys_of(base(), LOCKED)) for name, base in BASES.items()}
    first = next(iter(found.values()))
    assert all(keys == first for keys in found.values()), "bases have other keys; store them apart"
    return json.dumps({"bases": list(found), **first.to_json()}, indent=1) + "\n"


if __name__ == "__main__":
    (Path(wlb_titan.config.__file__).parent / FILE_NAME).write_text(text())
