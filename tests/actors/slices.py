"""Slices with any strides, for the tests of passes on CPUs, in Triton's interpreter and on GPUs."""

from __future__ import annotations

import torch

DTYPES = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
HOWS = ["plain", "transposed", "gaps", "inside"]


def memory(shape: list[int], itemsize: int, how: str, fill: bool) -> torch.Tensor:
    """A view of `shape`: as it comes, with its dims in another order, with gaps, or inside a larger tensor."""
    outer = {"inside": [n + 3 for n in shape], "gaps": [2 * n for n in shape]}.get(how, shape)
    order = list(range(len(shape)))[::-1] if how == "transposed" else list(range(len(shape)))
    size = torch.Size([outer[dim] for dim in order]).numel()
    octets = torch.randint(0, 256, (size * itemsize,), dtype=torch.uint8) if fill else None
    flat = octets if octets is not None else torch.zeros(size * itemsize, dtype=torch.uint8)
    whole = flat.view(DTYPES[itemsize]).view([outer[dim] for dim in order]).permute(order)
    if how == "gaps":
        return whole[tuple(slice(0, 2 * n, 2) for n in shape)]
    return whole[tuple(slice(1, 1 + n) if how == "inside" else slice(0, n) for n in shape)]
