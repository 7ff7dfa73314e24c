"""Main weights that an optimizer keeps as the 16 bits by which each is more exact than its bf16 weight.

Together they are the fp32 number. The first of the 16 bits decides which way the weight was rounded.
"""

from __future__ import annotations

import torch


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 main weights of bf16 weights and int16 remainders, all of one shape."""
    upper = weight.contiguous().view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((upper << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def split(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 weights and int16 remainders of fp32 main weights."""
    bits = main.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)  # the lower half
    upper = (bits >> 16) + (remainder < 0).to(torch.int32)
    return upper.to(torch.int16).view(torch.bfloat16), remainder


def put(main: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Round main weights that were loaded into their bf16 weights, which were loaded too, and return the remainders."""
    require_rounded(weight, main)
    rounded, remainder = split(main)
    weight.copy_(rounded)
    return remainder


def require_rounded(weight: torch.Tensor, main: torch.Tensor) -> None:
    """Raise ValueError where weights that were loaded are not their main weights, rounded one way or the other."""
    if not torch.allclose(weight.to(main.device, torch.float32), main.float(), 2**-8, 2**-24, equal_nan=True):
        raise ValueError(
            "the checkpoint has other main weights than those of its weights; Megatron writes such with "
            "store_param_remainders=True: save it without"
        )
