"""The ranks of a job talk about a plan: each says a word and all hear it, or all are told that one did not answer.

They talk over a gloo group of their own that lives for one conversation: its time limit is not that of the training's
collectives, it needs no GPU, and what a rank says can meet no collective of the training that another one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from placemat.graph.errors import PlacematError, RanksDisagree

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The processes of a group that talk to each other, as one of them sees it.

    Attributes:
        ranks: their global ranks, in the group's order.
        here: the global rank of this process.
        timeout_s: how long one waits for another.
    """

    ranks: tuple[int, ...]
    here: int
    timeout_s: float
    _group: Any

    @property
    def is_first(self) -> bool:
        return self.here == self.ranks[0]

    def all_say(self, word: T) -> dict[int, T]:
        """What every rank says, by rank.

        Raises:
            RanksDisagree: one did not answer.
        """
        words: list[Any] = [None] * len(self.ranks)
        with self._answered():
            dist.all_gather_object(words, word, group=self._group)
        return dict(zip(self.ranks, words, strict=True))

    def first_says(self, word: T | None) -> T:
        """What the first rank says; the word of the others is not looked at.

        Raises:
            RanksDisagree: it did not answer.
        """
        words: list[Any] = [word]
        with self._answered():
            dist.broadcast_object_list(words, src=self.ranks[0], group=self._group)
        answer: T = words[0]
        return answer

    @contextmanager
    def _answered(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo raises for a closed connection and for a time limit
            raise _no_answer(self.ranks, self.here, self.timeout_s, error) from error


@contextmanager
def conversation(group: Any, timeout_s: float) -> Iterator[Ranks]:
    """Let the ranks of a process group talk; every one of them has to call this.

    Args:
        group: a group of torch.distributed; None is the default one.
        timeout_s: how long a rank waits for the others (while they all gather, in steps of ten seconds).

    Raises:
        PlacematError: there is no process group, or this process is not in it.
        RanksDisagree: not all ranks came, or one left in the middle.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise PlacematError(
            "there is no process group, so there are no ranks that could have the same plan. Remedy: call this after "
            "torch.distributed.init_process_group(), on every rank; in a single process use placemat.plan()."
        )
    if not timeout_s > 0:
        raise PlacematError(f"timeout_s must be positive, got {timeout_s}.")
    here = dist.get_rank()
    ranks = tuple(dist.get_process_group_ranks(group))
    if here not in ranks:
        raise PlacematError(f"rank {here} is not in the group of ranks {list(ranks)}. Remedy: call this on those only.")
    try:
        own = dist.new_group(
            list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo", use_local_synchronization=True
        )
    except RuntimeError as error:
        raise _no_answer(ranks, here, timeout_s, error) from error
    try:
        yield Ranks(ranks, here, timeout_s, own)
    finally:  # whatever happened here: ranks that still wait learn at once that this one has left
        dist.destroy_process_group(own)


def attempt(make: Callable[[], T]) -> T | PlacematError:
    """What `make` returns, or the error of ours that it raises: a rank that fails still has to say so."""
    try:
        return make()
    except PlacematError as error:
        return error


def _no_answer(ranks: tuple[int, ...], here: int, timeout_s: float, error: BaseException) -> RanksDisagree:
    text = str(error).strip().splitlines() or [type(error).__name__]
    return RanksDisagree(
        f"rank {here} got no answer from all of the ranks {list(ranks)} within {timeout_s:g} s: another rank did not "
        f"make this call, left it by an error of its own, or was too slow ({text[0][:300]}). Remedy: make the call on "
        "every rank, look for the first error among their logs, or give more time with timeout_s=."
    )
