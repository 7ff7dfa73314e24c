"""The training state of one rank: tensors named by boxes, and the small things beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import Key, RankLayout, Shard, TensorSpec
from ray_etc.planners.parallel import Coordinate, ParallelConfig


class Stateful(Protocol):
    """Anything with a small picklable state that is the same on every rank: a scheduler, a loader's cursor."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Streams(Protocol):
    """State that differs from coordinate to coordinate, such as the random streams."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_streams(self, streams: Mapping[Coordinate, dict[str, Any]], coordinate: Coordinate, step: int) -> None:
        """Take the stream that belongs to `coordinate` from those of the old generation, or make a new one by rule.

        Args:
            streams: of the old ranks that `sources_of_streams` names for `coordinate`; none for a new pipeline stage.
            coordinate: of this rank.
            step: the next one to be trained.
        """


@dataclass(frozen=True)
class StateShard:
    """A box of a logical tensor and the memory that holds it: `view` has the box's lengths as its shape."""

    tensor: TensorSpec
    box: Box
    view: torch.Tensor

    def __post_init__(self) -> None:
        if tuple(self.view.shape) != self.box.lengths:
            raise ValueError(
                f"{self.tensor.key}: view of shape {tuple(self.view.shape)} for a box of {self.box.lengths}"
            )


class TrainState:
    """Everything a rank needs to go on training, and all of what a handover moves.

    Args:
        shards: the tensors, each a box of a logical tensor with the memory that holds it.
        replicated: small state that is equal on every rank, by name.
        streams: small state that belongs to a coordinate of the mesh, by name.
        scratch: memory that no step needs from the one before, such as gradient buffers: where memory is short, a
            resize frees it, and gives it back as zeros.
        derived: by (kind, name), tensors that are exactly another of the same shape, rounded to their dtype between any
            two steps: bf16 weights and their fp32 main weights.
        changed_early: (tensor, copy): what a step changes before its update begins, and the copy that stands for it in
            `shards`; see `hold`.
        optimizers: torch optimizers; their `step` marks when the tensors are half way between two steps. Without any,
            that is taken to be so all through each step, and each step to make an update. A rank that has nothing to
            update beside others that do gives one of nothing, as Megatron does, and calls its `step` when they do.
        updates_tried: how many updates were begun so far, also those that were then skipped, as where a gradient
            overflows. A step in which neither this grows nor an optimizer makes one is taken to gather gradients for a
            later one, which are not moved: a resize waits for that.
        check_parallel: raises ValueError, with the numbers and the remedy, for a configuration that this state
            cannot live under; called before anything starts.
    """

    def __init__(
        self,
        shards: Sequence[StateShard],
        *,
        replicated: Mapping[str, Stateful] | None = None,
        streams: Mapping[str, Streams] | None = None,
        scratch: Sequence[torch.Tensor] = (),
        derived: Mapping[Key, Key] | None = None,
        changed_early: Sequence[tuple[torch.Tensor, torch.Tensor]] = (),
        optimizers: Sequence[torch.optim.Optimizer] = (),
        updates_tried: Callable[[], int] | None = None,
        check_parallel: Callable[[ParallelConfig], None] | None = None,
    ) -> None:
        if not shards:
            raise ValueError("a train state without tensors: register at least the model's parameters")
        self.shards = list(shards)
        self.replicated = dict(replicated or {})
        self.streams = dict(streams or {})
        self.scratch = list(scratch)
        self.derived = dict(derived or {})
        self.changed_early = list(changed_early)
        self.optimizers = list(optimizers)
        self.updates_tried = updates_tried or (lambda: 0)
        self.check_parallel = check_parallel or (lambda parallel: None)
        self.next_step = 0
        """Where the first generation begins: later than 0 where the state was read from a checkpoint."""

    def check_memory(self) -> None:
        """Raise ValueError where training no longer uses the memory of the shards; asked where the loop is entered."""

    def layout(self) -> RankLayout:
        return tuple(Shard(shard.tensor, shard.box) for shard in self.shards)

    def views(self) -> list[torch.Tensor]:
        return [shard.view for shard in self.shards]

    @torch.no_grad()
    def hold(self) -> None:
        """An update is over: copy what changed before it.

        So a rank that is frozen in the next step, where a peer has died, still has all as it was between the two.
        """
        for live, held in self.changed_early:
            held.copy_(live)

    @torch.no_grad()
    def put_back(self) -> None:
        """The state of another generation, or of a checkpoint, has arrived: train with it."""
        for live, held in self.changed_early:
            live.copy_(held)

    def small_state(self) -> dict[str, dict[str, Any]]:
        """The small state as it is now: {"replicated": {name: ...}, "streams": {name: ...}}."""
        return {
            "replicated": {name: item.state_dict() for name, item in self.replicated.items()},
            "streams": {name: item.state_dict() for name, item in self.streams.items()},
        }
