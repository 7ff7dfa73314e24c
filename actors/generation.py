"""The driver's hold on one generation: its ranks, the slots they are in, and what came of their train loops."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ray_etc.actors.context import Context
from ray_etc.actors.messages import Entered
from ray_etc.actors.outcomes import Outcome
from ray_etc.actors.rank import Rank
from ray_etc.actors.sharing import SharedMemory
from ray_etc.actors.slots import Slot
from ray_etc.planners.layout import Key, RankLayout
from ray_etc.planners.links import Links
from ray_etc.planners.parallel import ParallelConfig


@dataclass(frozen=True)
class TrainJob:
    """What every rank of every generation runs."""

    name: str
    loop: Callable[..., Any]
    config: dict[str, Any] | None
    resources: dict[str, float]
    runtime_env: dict[str, Any]
    timeout_s: float
    start_timeout_s: float
    slot_nbytes: int | None = None
    """What all processes of a slot may have of its memory together; None for all of a GPU, or no limit on CPUs."""
    links: Links = field(default_factory=Links)
    """How fast bytes travel, and how large a slice goes without packing."""


class Wait(Protocol):
    """Waits for Ray results while the run goes on watching.

    Raises what they raise, TimeoutError with `what` after `timeout_s`, or why waiting on became pointless.
    """

    def __call__(self, refs: Sequence[ray.ObjectRef], timeout_s: float, what: str) -> list[Any]: ...


@dataclass
class Generation:
    """Ranks that train together; `slots[r]` is where rank r lives."""

    number: int
    parallel: ParallelConfig
    slots: list[Slot]
    ranks: list[Any] = field(default_factory=list)
    becoming: list[ray.ObjectRef] = field(default_factory=list)
    outcome_refs: list[ray.ObjectRef] = field(default_factory=list)
    entered: list[Entered] = field(default_factory=list)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    dead: dict[int, Exception] = field(default_factory=dict)
    has_stepped: bool = False
    """Whether every rank has done its first step, and so everything that is done only once."""

    @classmethod
    def create(
        cls,
        number: int,
        parallel: ParallelConfig,
        slots: Sequence[Slot],
        job: TrainJob,
        standbys: Mapping[int, Any],
        about_step: int | None,
    ) -> Generation:
        """One process in each slot: its standby where there is one, else a new one. For `about_step` see `Context`."""
        generation = cls(number, parallel, list(slots))
        for context in _contexts(number, parallel, slots, job.name, about_step):
            slot = slots[context.world_rank]
            rank = standbys.get(slot.slot_id) or start_process(slot, job)
            generation.ranks.append(rank)
            generation.becoming.append(rank.become.remote(context, _environment(slot, context, job)))
        return generation

    def start_loops(self, store: tuple[str, int], job: TrainJob, is_emptied: bool) -> None:
        """Have every rank build its model, which is emptied for a tight handover or not."""
        limit = (job.resources.get("GPU", 0.0), job.slot_nbytes)
        self.outcome_refs = [
            rank.train.remote(job.loop, job.config, store, job.start_timeout_s, limit, is_emptied)
            for rank in self.ranks
        ]

    def share(self, shared: Sequence[SharedMemory]) -> None:
        """Take in how the next generation can map the memory of each rank."""
        self.entered = [replace(each, shared=memory) for each, memory in zip(self.entered, shared, strict=True)]

    def layouts(self) -> dict[int, RankLayout]:
        """What each slot holds, as its rank reported it."""
        return {slot.slot_id: entered.layout for slot, entered in zip(self.slots, self.entered, strict=True)}

    @property
    def derived(self) -> dict[Key, Key]:
        """Of which tensor another is exactly the rounded value, on any rank."""
        return {key: of for entered in self.entered for key, of in entered.derived.items()}

    @property
    def living_slot_ids(self) -> set[int]:
        """Slots with a process in them."""
        return {self.slots[rank].slot_id for rank in self.survivors()}

    @property
    def slot_ids(self) -> set[int]:
        return {slot.slot_id for slot in self.slots}

    def actor_in(self, slot_id: int) -> Any:
        """The rank in a slot."""
        return next(actor for actor, slot in zip(self.ranks, self.slots, strict=True) if slot.slot_id == slot_id)

    def survivors(self) -> list[int]:
        return [rank for rank in range(len(self.ranks)) if rank not in self.dead]

    def kill(self) -> None:
        """End every process of this generation, whatever it is doing."""
        for rank in self.ranks:
            ray.kill(rank, no_restart=True)


def start_process(slot: Slot, job: TrainJob) -> Any:
    """A process that may become a rank, with half of the slot's share, so that the next generation fits beside it."""
    options: dict[str, Any] = {
        "num_cpus": job.resources.get("CPU", 0.0) / 2,
        "num_gpus": job.resources.get("GPU", 0.0) / 2,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(slot.group, placement_group_bundle_index=0),
        "runtime_env": job.runtime_env or None,
    }
    return cast(Any, Rank).options(**options).remote()


def _environment(slot: Slot, context: Context, job: TrainJob) -> dict[str, str]:
    environment = {}
    if job.resources.get("GPU"):
        # After a death torch would end the survivors too, and with them the state. The driver sees deaths by itself.
        environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if 0 < job.resources.get("GPU", 0.0) < 1:
        # NCCL refuses two ranks on one GPU unless it takes them for separate hosts.
        environment["NCCL_HOSTID"] = f"slot-{slot.slot_id}-generation-{context.generation}"
    return environment


def _contexts(
    number: int, parallel: ParallelConfig, slots: Sequence[Slot], name: str, about_step: int | None
) -> list[Context]:
    nodes = [slot.node_id for slot in slots]
    node_ranks: Mapping[str | None, int] = {node: index for index, node in enumerate(dict.fromkeys(nodes))}
    sizes, seen = Counter(nodes), defaultdict[str | None, int](int)
    contexts = []
    for rank, (slot, node) in enumerate(zip(slots, nodes, strict=True)):
        local = seen[node], sizes[node], node_ranks[node]
        contexts.append(Context(name, number, parallel, rank, *local, slot.slot_id, about_step))
        seen[node] += 1
    return contexts
