"""Layouts with memory that is known byte by byte, plans between them, and what may happen to a message on its way."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ray_etc.actors.mover import Mover, MoveReport
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.plan import MigrationPlan

Layouts = dict[int, RankLayout]


def truth(spec: TensorSpec) -> torch.Tensor:
    """A logical tensor with bytes of its own, the same wherever it is made."""
    generator = torch.Generator().manual_seed(sum(map(ord, spec.kind + spec.name)))
    numel = int(torch.tensor(spec.shape).prod()) if spec.shape else 1
    raw = torch.randint(0, 256, (numel * spec.itemsize,), dtype=torch.uint8, generator=generator)
    return raw.view(getattr(torch, spec.dtype)).reshape(spec.shape)


def part_of(shard: Shard) -> torch.Tensor:
    return truth(shard.tensor)[shard.box.slices_in(Box.whole(shard.tensor.shape))]


def views_for(layout: RankLayout, filled: bool, contiguous: bool = True) -> list[torch.Tensor]:
    """Memory for a layout, all of it in one flat buffer a type, or with gaps and transposed."""
    views = []
    for shard in layout:
        part = part_of(shard) if filled else torch.full_like(part_of(shard), 1)
        if not contiguous and part.dim() > 1:
            part = part.transpose(0, 1).contiguous().transpose(0, 1)
        elif not contiguous and part.dim() == 1:
            part = torch.stack([part, part], dim=1)[:, 0]
        views.append(part)
    return views


def octets(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy().tobytes()


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return octets(a) == octets(b)


def tensor_parallel(world: int, dim: int, specs: list[TensorSpec]) -> Layouts:
    def box(spec: TensorSpec, rank: int) -> Box:
        if dim >= len(spec.shape):
            return Box.whole(spec.shape)
        start, stop = (spec.shape[dim] * r // world for r in (rank, rank + 1))
        offsets, lengths = [0] * len(spec.shape), list(spec.shape)
        offsets[dim], lengths[dim] = start, stop - start
        return Box(tuple(offsets), tuple(lengths))

    return {rank: tuple(Shard(spec, box(spec, rank)) for spec in specs) for rank in range(world)}


MODEL = [
    TensorSpec("param", "embed", (12, 6), "bfloat16", 2),
    TensorSpec("exp_avg", "embed", (12, 6), "float32", 4),
    TensorSpec("param", "odd", (7,), "bfloat16", 2),
    TensorSpec("main_param", "odd", (7,), "float32", 4),
    TensorSpec("param", "steps", (), "int64", 8),
    TensorSpec("param", "empty", (0, 4), "float32", 4),
    TensorSpec("param", "experts", (3, 4, 5), "uint8", 1),
]


def plan_between(source: Layouts, target: Layouts, staging_nbytes: int = 256) -> MigrationPlan:
    slots = source.keys() | target.keys()
    plan = make_plan(source, target, dict.fromkeys(slots, "node"), staging_nbytes=staging_nbytes)
    plan.check()
    return plan


class FlippedBit(Mover):
    """Flips a bit of what the first round received from the first peer, before it is unpacked."""

    def run(self, timeout_s: float, on_event: Callable[[str], None] = lambda event: None) -> MoveReport:
        def damage(event: str) -> None:
            if event == "round:0:received":
                assert self._work is not None
                self.damage(next(iter(self._work.rounds[0].receives.values()))[0])
            on_event(event)

        return super().run(timeout_s, damage)

    def damage(self, message: torch.Tensor) -> None:
        message[5:6].bitwise_xor_(8)


class SwappedElements(FlippedBit):
    def damage(self, message: torch.Tensor) -> None:
        message[:8] = message[:8].view(2, 4).flip(0).view(-1)


class SwappedSlices(FlippedBit):
    def damage(self, message: torch.Tensor) -> None:
        message[:128] = message[:128].view(2, 64).flip(0).view(-1)


DAMAGES: dict[type[Mover], int] = {FlippedBit: 1, SwappedElements: 1, SwappedSlices: 2}
"""And how many moves of `TWINS` then fail."""
TWINS = [TensorSpec("param", name, (8, 8), "float32", 4) for name in ("first", "second")]
"""From rows to columns on two ranks, each gives the other 64 bytes of both."""
