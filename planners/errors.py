"""What can be wrong with a migration, as exceptions that carry the numbers and survive a pickle."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ray_etc.planners.boxes import Box
from ray_etc.planners.words import size

NAMED_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A part of a target tensor that cannot be had from any source, and why."""

    kind: str
    name: str
    box: Box
    nbytes: int
    reason: str

    @property
    def numel(self) -> int:
        return self.box.numel

    def __str__(self) -> str:
        return (
            f"{self.kind} {self.name} offsets {self.box.offsets} lengths {self.box.lengths}: "
            f"{self.numel} elements, {self.nbytes} bytes, {self.reason}"
        )


class StateMissing(ValueError):  # noqa: N818  (says what is wrong, the way Ray names its own)
    """The target needs state that no source holds in that shape and dtype.

    `missing` are disjoint parts: an element that several target ranks need is counted once.
    """

    def __init__(self, missing: Iterable[MissingPart]) -> None:
        self.missing = tuple(missing)
        super().__init__(self.missing)

    @property
    def numel(self) -> int:
        return sum(part.numel for part in self.missing)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.missing)

    def __str__(self) -> str:
        tensor_count = len({(part.kind, part.name) for part in self.missing})
        lines = [
            f"{self.numel} elements ({self.nbytes} bytes) of {tensor_count} tensors cannot be had from any source:"
        ]
        lines += [f"  {part}" for part in self.missing[:NAMED_AT_MOST]]
        if len(self.missing) > NAMED_AT_MOST:
            lines.append(f"  and {len(self.missing) - NAMED_AT_MOST} more parts")
        return "\n".join(lines)


class DoesNotFit(ValueError):  # noqa: N818
    """A resize needs more memory in a slot than there is, in either mode. All numbers are bytes.

    `safe` and `tight` are what old state, new state and staging need together in slot `slot`, `safe_room` and
    `tight_room` what there is for them.
    """

    def __init__(self, slot: int, node: str, safe: int, safe_room: int, tight: int, tight_room: int) -> None:
        super().__init__(slot, node, safe, safe_room, tight, tight_room)
        self.slot, self.node = slot, node
        self.safe, self.safe_room, self.tight, self.tight_room = safe, safe_room, tight, tight_room

    def __str__(self) -> str:
        return (
            f"slot {self.slot} on {self.node} has no room for the resize: keeping the old state needs "
            f"{size(self.safe)} of {size(max(self.safe_room, 0))} there are, releasing it phase by phase "
            f"{size(self.tight)} of {size(max(self.tight_room, 0))}, {size(self.tight - self.tight_room)} too much; "
            "spread the state over more slots, let training use less of each, or raise slot_nbytes where it was given"
        )


class PlanError(ValueError):
    """A plan that would not carry the source layout into the target layout, or not within its budget.

    `tensor` is the (kind, name) and `box` the part that is wrong, where one is; `ranks` are the plan's ranks at fault.
    """

    def __init__(
        self, reason: str, ranks: tuple[int, ...] = (), tensor: tuple[str, str] | None = None, box: Box | None = None
    ) -> None:
        super().__init__(reason, ranks, tensor, box)
        self.reason = reason
        self.ranks = ranks
        self.tensor = tensor
        self.box = box

    def __str__(self) -> str:
        parts = [self.reason]
        if self.tensor is not None:
            parts.append("tensor " + " ".join(self.tensor))
        if self.box is not None:
            parts.append(f"offsets {self.box.offsets} lengths {self.box.lengths}")
        if self.ranks:
            parts.append("ranks " + ", ".join(map(str, self.ranks)))
        return "; ".join(parts)
