"""Settings that every test runs under: one thread, a fixed random state, no network."""

from __future__ import annotations

import gc
import os
import random

# The models are built from configurations; a test that reached for a hub would pass or fail by the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import pytest
import torch

# Bitwise comparisons need sums in one order, and on a loaded machine two threads slow small kernels down tenfold.
torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Take what imports made out of garbage collection: `measure` collects before each step, 0.3 s each otherwise."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fixed_random_state() -> None:
    """A test's outcome depends neither on the tests before it nor on the order they run in."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
