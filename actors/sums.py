"""The checksum of a slice, by position: what it is, and how a CPU computes it. GPUs do so in kernels/tiles.py.

The bytes of the slice in row-major order, whatever the strides of its memory, are taken as 32-bit little-endian words
and cut into tiles. The sum, modulo 2**64, is that of word x weight of its place in the tile x factor of the tile.
Weights are distinct 32-bit numbers above 0, factors are odd. So within a tile any flipped bit and any two words that
change places always show: a difference of 32 bits times one of 32 bits does not vanish in 64, and an odd factor takes
nothing away. Between tiles a swap stays hidden in one case in 2**32 at worst.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

TILE_WORDS = 8192
TILES_AT_ONCE = 128
"""Bounds what a CPU needs beside the slice: 8 MiB for products."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same width: copied and summed bit by bit, whatever the type.

    A complex tensor gets one more dim, of length 2.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(INTEGERS[tensor.element_size()])


def weighted_sum(slice_: torch.Tensor) -> int:
    """The sum of a slice of integers in host memory, as a signed 64-bit number."""
    octets = np.ascontiguousarray(slice_.numpy()).reshape(-1).view(np.uint8)
    words = np.zeros(-(-octets.size // 4), "<u4")
    words.view(np.uint8)[: octets.size] = octets
    total = np.zeros(1, np.uint64)  # an array, since numpy warns where a scalar wraps around
    weights, step = place_weights(TILE_WORDS), TILE_WORDS * TILES_AT_ONCE
    for first in range(0, words.size, step):
        piece = words[first : first + step].astype(np.uint64)
        whole = piece.size // TILE_WORDS * TILE_WORDS
        parts = piece[:whole].reshape(-1, TILE_WORDS) @ weights
        if whole < piece.size:
            parts = np.append(parts, piece[whole:] @ weights[: piece.size - whole])
        tiles = np.arange(first // TILE_WORDS, first // TILE_WORDS + parts.size, dtype=np.uint64)
        total += (parts * (mix(tiles) | np.uint64(1))).sum(dtype=np.uint64)
    return int(total.view(np.int64)[0])


def with_sizes(sums: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
    """Sums, as uint64, that also tell slices of zeros of different sizes apart, and from one that is missing."""
    return sums.view(np.uint64) + mix(nbytes.astype(np.uint64) + np.uint64(1 << 32))


@lru_cache(maxsize=2)
def place_weights(count: int) -> np.ndarray:
    """murmur3's 32-bit finalizer of 1, 2, ...: it is one to one, and only 0 gives 0. As uint64."""
    x = np.arange(1, count + 1, dtype=np.uint32)
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return (x ^ (x >> np.uint32(16))).astype(np.uint64)


def mix(numbers: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood, 2014): fixed, well-spread 64-bit values of small numbers."""
    x = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
