"""ZeRO-1 ranges as arrays: parts laid end to end, cut into equal flat ranges, and those into boxes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of flat buffers as boxes: int64, one row a box.

    Row i is the box `offsets[i]`, `lengths[i]` ([rows, ndim], relative to its part) of part `part[i]` in lane
    `lane[i]`, and lies in range `index[i]` of its buffer.
    """

    part: np.ndarray
    lane: np.ndarray
    index: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray


def cut_buffers(buffer: np.ndarray, lengths: np.ndarray, range_count: int) -> Pieces:
    """Cut each buffer into `range_count` equal flat ranges, the last ones short or empty, and each range into boxes.

    `buffer` is int64 [parts], ascending: the parts of one buffer follow each other, laid end to end in that order.
    `lengths`, int64 [parts, lanes, ndim], is the shape of each part; a lane is a set of buffers of its own, as each
    tensor-parallel rank has.
    """
    numel = lengths.prod(axis=2)
    ends = numel.cumsum(axis=0)
    starts = ends - numel
    # Of each part: where the first and the last part of its buffer are.
    first = np.searchsorted(buffer, buffer, side="left")
    last = np.searchsorted(buffer, buffer, side="right") - 1
    base = starts[first]
    chunk = np.maximum(-(-(ends[last] - base) // range_count), 1)
    starts = starts - base
    part, lane = np.nonzero(numel)
    start, size, chunk = starts[part, lane], numel[part, lane], chunk[part, lane]
    low_range = start // chunk
    counts = (start + size - 1) // chunk - low_range + 1
    # One entry a (part, range) that meet.
    entry = np.repeat(np.arange(len(part)), counts)
    index = low_range[entry] + np.arange(len(entry)) - np.repeat(counts.cumsum() - counts, counts)
    low = np.maximum(index * chunk[entry] - start[entry], 0)
    high = np.minimum((index + 1) * chunk[entry] - start[entry], size[entry])
    part, lane = part[entry], lane[entry]
    piece, offsets, box_lengths = ranges_to_boxes(low, high, lengths[part, lane])
    return Pieces(part[piece], lane[piece], index[piece], offsets, box_lengths)


def ranges_to_boxes(
    start: np.ndarray, stop: np.ndarray, shape: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`flat_range_to_boxes` for many tensors at once, in no particular order.

    Elements [start[i], stop[i]) of a row-major tensor of shape[i] ([ranges, ndim], ndim at least 1). Gives the number
    of the range that each box is of, and its offsets and lengths, all int64.
    """
    boxes: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    ndim = shape.shape[1]

    def cut(dim: int, which: np.ndarray, start: np.ndarray, stop: np.ndarray, offsets: np.ndarray) -> None:
        """Cut what lies inside one row of all dims before `dim`; `offsets` [rows, ndim] are set up to there."""
        some = stop > start
        which, start, stop, offsets = which[some], start[some], stop[some], offsets[some]
        if not len(which):
            return
        row = shape[which, dim + 1 :].prod(axis=1)
        first = -(-start // row)
        count = np.maximum(stop // row - first, 0)
        whole = count > 0
        box_offsets, box_lengths = offsets[whole], np.ones_like(offsets[whole])
        box_offsets[:, dim], box_lengths[:, dim] = first[whole], count[whole]
        box_lengths[:, dim + 1 :] = shape[which[whole], dim + 1 :]
        boxes.append((which[whole], box_offsets, box_lengths))
        if dim + 1 == ndim:
            return
        head_stop = np.minimum(first * row, stop)
        tail_start = np.maximum(head_stop, (first + count) * row)
        for low, high in ((start, head_stop), (tail_start, stop)):
            inner = offsets.copy()
            inner[:, dim] = low // row
            cut(dim + 1, which, low - inner[:, dim] * row, high - inner[:, dim] * row, inner)

    cut(0, np.arange(len(start)), start, stop, np.zeros_like(shape))
    which, offsets, lengths = (
        (np.concatenate(column) for column in zip(*boxes, strict=True))
        if boxes
        else (
            np.zeros(0, dtype=np.int64),
            np.zeros((0, ndim), dtype=np.int64),
            np.zeros((0, ndim), dtype=np.int64),
        )
    )
    return which, offsets, lengths
