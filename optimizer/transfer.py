"""Transfer: keep in one block what another block that is equal to it keeps.

Layers repeat, and a plan that a search ends with treats some of them better than others. What each block keeps is its
pattern; every pattern of a class of equal blocks is tried on all the others of the class. Blocks are found as
`identical.py` finds identical ops: the i-th op of every group of so many ops is of the i-th block.
"""

from __future__ import annotations

from collections import defaultdict

from placemat.descent import Descent
from placemat.identical import identical_ops

Pattern = tuple[bool, ...]  # whether each value of a block is kept


class Transfer:
    """Moves of patterns between equal blocks.

    Attributes:
        classes: of each class, the blocks; of each block, its droppable values, in the same order in all of a class.
    """

    def __init__(self, descent: Descent) -> None:
        self.descent = descent
        problem, everything = descent.sets.problem, descent.sets.everything
        by_size: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for group in identical_ops(problem):
            if all(v in everything for o in group for v in problem.ops[o].outputs):
                by_size[len(group)].append(group)
        self.classes = [
            [[v for group in groups for v in problem.ops[group[i]].outputs] for i in range(size)]
            for size, groups in by_size.items()
        ]

    def run(self) -> None:
        for blocks in self.classes:
            self._round(blocks)

    def _round(self, blocks: list[list[int]]) -> None:
        moves = [
            (-saved_s, i, pattern)
            for pattern in sorted({self._pattern(block) for block in blocks})
            for i, block in enumerate(blocks)
            if (saved_s := self.descent.saved_s(self._with(block, pattern)))
        ]
        for _, i, pattern in sorted(moves):
            after = self._with(blocks[i], pattern)
            if self.descent.goes_on() and self.descent.saved_s(after):
                self.descent.moves_to(after)

    def _pattern(self, block: list[int]) -> Pattern:
        return tuple(v in self.descent.kept for v in block)

    def _with(self, block: list[int], pattern: Pattern) -> frozenset[int]:
        kept = {v for v, is_kept in zip(block, pattern, strict=True) if is_kept}
        return self.descent.kept - frozenset(block) | kept
