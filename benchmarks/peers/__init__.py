"""Ways to run a training step in less memory, side by side: what people use today, and placemat."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.peers.contender import Contender, Setting
from benchmarks.peers.eager import Eager
from benchmarks.peers.memory_budget import MemoryBudget
from benchmarks.peers.placemat_plans import PlacematPlans
from benchmarks.peers.selective import Selective
from benchmarks.peers.torch_checkpoint import TorchCheckpoint

CONTENDERS: Mapping[str, Contender] = {
    contender.name: contender
    for contender in (Eager(), TorchCheckpoint(), Selective(), MemoryBudget(), PlacematPlans())
}
# All but the reference and ourselves.
PEERS = tuple(name for name in CONTENDERS if name not in (Eager.name, PlacematPlans.name))

__all__ = ["CONTENDERS", "PEERS", "Contender", "Eager", "PlacematPlans", "Setting"]
