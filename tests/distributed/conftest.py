import datasets
import numpy as np
import pytest
from lab import Lab  # first: a test module may import torchtitan


def pytest_addoption(parser):
    parser.addoption("--layouts", default="12", help="random layouts: how many, or FIRST:LAST of their seeds")


@pytest.fixture(scope="session")
def lab(tmp_path_factory, fork_server):
    return Lab(tmp_path_factory.mktemp("lab"), fork_server)


CONVERSATIONS = {"dense": (300, 0.5), "sparse": (300, 0.15), "few": (80, 0.5)}
"""How many, and the share of them with a learned stretch."""


@pytest.fixture(scope="session")
def conversations(lab):
    """Folders of datasets as other tools write them: token ids, and labels, -100 where nothing is learned."""
    folders = {}
    for name, (count, share) in CONVERSATIONS.items():
        random = np.random.default_rng(0)
        lengths = np.clip(random.lognormal(3.8, 1.1, size=count), 4, 700).astype(int)
        tokens = [random.integers(1, 400, size=length).tolist() for length in lengths]
        labels = [[-100] * len(row) for row in tokens]
        for row, own in zip(tokens, labels, strict=True):
            if random.random() < share:
                start, stop = sorted(random.integers(0, len(row) + 1, size=2))
                own[start:stop] = row[start:stop]
        folders[name] = lab.folder / f"conversations_{name}"
        datasets.Dataset.from_dict({"input_ids": tokens, "labels": labels}).save_to_disk(folders[name])
    return folders
