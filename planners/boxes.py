"""Boxes: rectangular parts of a logical tensor, and the flat ranges of an optimizer cut into boxes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """A rectangular part of a tensor: one (offset, length) pair a dim, in elements.

    Offsets and lengths rather than slices, so that a box can be hashed, compared and pickled.
    A box of a 0-dim tensor has no pairs and holds one element; a length of 0 makes an empty box.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box that covers a tensor of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.lengths)

    def intersect(self, other: Box) -> Box | None:
        """The common part, in the same coordinates; None where there is none."""
        offsets, lengths = [], []
        for a, n, b, m in zip(self.offsets, self.lengths, other.offsets, other.lengths, strict=True):
            start, stop = max(a, b), min(a + n, b + m)
            if stop <= start:
                return None
            offsets.append(start)
            lengths.append(stop - start)
        return Box(tuple(offsets), tuple(lengths))

    def minus(self, part: Box) -> list[Box]:
        """This box without `part`, as disjoint boxes; `part` must lie inside this box."""
        rest: list[Box] = []
        offsets, lengths = list(self.offsets), list(self.lengths)
        for dim, (start, length) in enumerate(zip(part.offsets, part.lengths, strict=True)):
            before = start - offsets[dim]
            after = offsets[dim] + lengths[dim] - (start + length)
            if before:
                rest.append(Box(tuple(offsets), (*lengths[:dim], before, *lengths[dim + 1 :])))
            if after:
                rest.append(
                    Box(
                        (*offsets[:dim], start + length, *offsets[dim + 1 :]),
                        (*lengths[:dim], after, *lengths[dim + 1 :]),
                    )
                )
            offsets[dim], lengths[dim] = start, length
        return [box for box in rest if box.numel]

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box inside a tensor that holds `outer`."""
        return tuple(
            slice(offset - start, offset - start + length)
            for offset, length, start in zip(self.offsets, self.lengths, outer.offsets, strict=True)
        )

    def shifted(self, by: tuple[int, ...]) -> Box:
        """The same box, `by` elements further along each dim."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.lengths)


def flat_range_to_boxes(start: int, stop: int, shape: tuple[int, ...]) -> list[tuple[Box, int]]:
    """Cut elements [start, stop) of a row-major tensor of `shape` into boxes.

    Each box is contiguous in the flat tensor; with it comes its flat start. There are at most
    2 * ndim - 1 of them. ZeRO-1 shards are such ranges (Rajbhandari et al., ZeRO, arXiv 1910.02054).
    """
    if stop <= start:
        return []
    if not shape:
        return [(Box((), ()), start)]
    if len(shape) == 1:
        return [(Box((start,), (stop - start,)), start)]
    row = prod(shape[1:])
    boxes: list[tuple[Box, int]] = []

    def partial_row(index: int, first: int, last: int) -> None:
        for box, flat in flat_range_to_boxes(first - index * row, last - index * row, shape[1:]):
            boxes.append((Box((index, *box.offsets), (1, *box.lengths)), flat + index * row))

    if start % row:
        head_stop = min(stop, (start // row + 1) * row)
        partial_row(start // row, start, head_stop)
        start = head_stop
    whole_rows = (stop - start) // row
    if whole_rows > 0:
        first = start // row
        boxes.append((Box((first, *(0 for _ in shape[1:])), (whole_rows, *shape[1:])), start))
        start += whole_rows * row
    if start < stop:
        partial_row(start // row, start, stop)
    return boxes
