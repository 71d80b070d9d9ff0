"""The ranks of a job talk about a plan: each says a word and all hear it, or all are told who did not answer.

They talk through the key-value store that the process group was made with: it waits as long as it is told to, not as
long as the training's collectives may take, it needs no GPU, it knows who is missing, and what a rank says can meet no
collective of the training that another one runs.
"""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from placemat.graph import torch_private
from placemat.graph.errors import PlacematError, RanksDisagree

T = TypeVar("T")

_LEFT = b"left"  # said by a rank that ends a conversation by an error, in place of its next word


@dataclass
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
    _store: Any
    _prefix: str
    _num_said: int = field(default=0, init=False)

    @property
    def is_first(self) -> bool:
        return self.here == self.ranks[0]

    def all_say(self, word: T) -> dict[int, T]:
        """What every rank says, by rank.

        Raises:
            RanksDisagree: one did not answer, or has left.
        """
        return self._hear(self.ranks, self._say(word))

    def first_says(self, word: object) -> Any:
        """What the first rank says; the word of the others is not looked at.

        Raises:
            RanksDisagree: it did not answer, or has left.
        """
        words: dict[int, Any] = self._hear(self.ranks[:1], self._say(word))
        return words[self.ranks[0]]

    def leave(self) -> None:
        """Tell those who wait for this rank's next word that it will not come."""
        self._store.set(self._key(self._num_said, self.here), _LEFT)

    def _say(self, word: object) -> int:
        number = self._num_said
        self._store.set(self._key(number, self.here), zlib.compress(pickle.dumps(word)))
        self._num_said += 1
        return number

    def _hear(self, speakers: Sequence[int], number: int) -> dict[int, Any]:
        keys = {rank: self._key(number, rank) for rank in speakers}
        end_s = time.monotonic() + self.timeout_s
        for key in keys.values():
            try:
                self._store.wait([key], timedelta(seconds=max(0.001, end_s - time.monotonic())))
            except RuntimeError as error:  # a file store's; that of a TCP store is a DistStoreError, which is one, too
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                self._store.set(self._key(number, self.here), _LEFT)  # who comes too late must not count on this rank
                raise RanksDisagree(
                    f"rank {self.here} got no answer from {_named(missing)} within {self.timeout_s:g} s. Remedy: make "
                    "this call on every rank of the group, or give more time with timeout_s=."
                ) from error
        said = {rank: self._store.get(key) for rank, key in keys.items()}
        if gone := [rank for rank, text in said.items() if text == _LEFT]:
            raise RanksDisagree(
                f"rank {self.here} got no answer from {_named(gone)}: an error ended the call there. Remedy: look for "
                "the first error in the logs."
            )
        return {rank: pickle.loads(zlib.decompress(text)) for rank, text in said.items()}

    def _key(self, number: int, rank: int) -> str:
        return f"{self._prefix}/{number}/{rank}"


@contextmanager
def conversation(group: Any, timeout_s: float) -> Iterator[Ranks]:
    """Let the ranks of a process group talk; every one of them has to call this.

    Args:
        group: a group of torch.distributed; None is the default one.
        timeout_s: how long a rank waits for the others.

    Raises:
        PlacematError: there is no process group, or this process is not in it.
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
        raise PlacematError(f"rank {here} is not in the group of {_named(ranks)}. Remedy: call this on those only.")
    store = torch_private.default_store()
    # Each rank counts its conversations with the same ranks. One that missed a conversation finds that the others left
    # it, and is in step again with the next.
    members = ",".join(map(str, ranks))
    count = store.add(f"placemat/{members}/count/{here}", 1)
    talk = Ranks(ranks, here, timeout_s, store, f"placemat/{members}/{count}")
    is_finished = False
    try:
        yield talk
        is_finished = True
    finally:
        if not is_finished:
            talk.leave()


def attempt(make: Callable[[], T]) -> T | PlacematError:
    """What `make` returns, or the error of ours that it raises: a rank that fails still has to say so."""
    try:
        return make()
    except PlacematError as error:
        return error


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"
