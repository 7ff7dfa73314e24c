"""Tight moves in one process: old and new ranks share memory as processes do, and calls to them are threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from ray_etc.actors import sharing
from ray_etc.actors.errors import CertificateError, StateLost
from ray_etc.actors.faults import Fault, FaultInjector
from ray_etc.actors.generation import Generation
from ray_etc.actors.memory import StateMemory
from ray_etc.actors.messages import Entered
from ray_etc.actors.phased import PhaseReport, RankPhase, check_derived, move_as_new, move_as_old
from ray_etc.actors.pipeline import BUFFERS
from ray_etc.actors.record import ResizeRecord
from ray_etc.actors.slots import Slot
from ray_etc.actors.sums import as_integers
from ray_etc.actors.tight import TightMove
from ray_etc.actors.transports import GlooTransport
from ray_etc.actors.work import ALIGNMENT
from ray_etc.planners import memory as planned_memory
from ray_etc.planners.boxes import Box
from ray_etc.planners.expected import expected_layouts
from ray_etc.planners.layout import Key, RankLayout, TensorSpec
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.phases import cut_in_phases

PADDING = 16
LAYERS = 6
PARTS: list[tuple[str, tuple[int, ...], int | None, int]] = [
    ("embed", (5, 8), 0, -1),
    *((f"{layer}.q", (8, 8), 0, layer) for layer in range(LAYERS)),
    *((f"{layer}.out", (8, 8), 1, layer) for layer in range(LAYERS)),
    ("norm", (8,), None, LAYERS),
]
KINDS = {"param": ("bfloat16", 2), "main_param": ("float32", 4), "exp_avg": ("float32", 4)}
MODEL = [TensorSpec(k, n, shape, *KINDS[k], split, layer) for k in KINDS for n, shape, split, layer in PARTS]
DERIVED: dict[Key, Key] = {("param", name): ("main_param", name) for name, *_ in PARTS}
DP2, TP2, TP1 = ParallelConfig(data_parallel=2), ParallelConfig(tensor_parallel=2), ParallelConfig()
PLAIN_DP2 = ParallelConfig(data_parallel=2, distributed_optimizer=False)


def truth(spec: TensorSpec) -> torch.Tensor:
    """No element is zero; a weight is its main weight, rounded."""
    kind = "main_param" if spec.kind == "param" else spec.kind
    generator = torch.Generator().manual_seed(sum(map(ord, kind + spec.name)))
    values = torch.rand(spec.shape, generator=generator) + 1.0
    return values.to(getattr(torch, spec.dtype))


def memory_for(layout: RankLayout, is_filled: bool) -> list[torch.Tensor]:
    """All weights in one flat buffer with padding between them; everything else apart, parts of a tensor together."""
    together = [shard.tensor.kind if shard.tensor.kind == "param" else shard.tensor.key for shard in layout]
    sizes: dict[Any, int] = {}
    for name, shard in zip(together, layout, strict=True):
        sizes[name] = sizes.get(name, 0) + shard.nbytes + PADDING
    flat = {name: torch.full((size,), 7, dtype=torch.uint8) for name, size in sizes.items()}
    starts = dict.fromkeys(sizes, 0)
    views = []
    for name, shard in zip(together, layout, strict=True):
        start, dtype = starts[name], getattr(torch, shard.tensor.dtype)
        view = flat[name][start : start + shard.nbytes].view(dtype).view(shard.box.lengths)
        if is_filled:
            view.copy_(truth(shard.tensor)[shard.box.slices_in(Box.whole(shard.tensor.shape))])
        starts[name] = start + shard.nbytes + PADDING
        views.append(view)
    return views


class LocalRank:
    """What a tight move calls of `actors.rank.Rank`; `rank.method.remote(...)` runs in a thread."""

    def __init__(self, pool: ThreadPoolExecutor, layout: RankLayout, is_filled: bool) -> None:
        self._pool, self.layout, self.views = pool, layout, memory_for(layout, is_filled)
        self.gradients = torch.full((5,), 3.0)
        self.memory = StateMemory(self.views, [self.gradients])
        self.transport: GlooTransport | None = None
        self.faults: list[Any] = []
        """For each phase in turn, what to do at its events."""
        if not is_filled:
            self.memory.empty()

    def entered(self, is_shared: bool) -> Entered:
        shared = self.memory.share() if is_shared else None
        return Entered(self.layout, shared, self.memory.allocations, DERIVED)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self, f"_{name}")
        return type("Method", (), {"remote": lambda _, *arguments: self._pool.submit(method, *arguments)})()

    def _move_phase(
        self, group: str, part: RankPhase, shared: sharing.SharedMemory | None, is_new: bool, timeout_s: float
    ) -> PhaseReport:
        fault = self.faults.pop(0) if self.faults else lambda event: None
        if is_new:
            return move_as_new(part, self.memory, self.layout, self.views, shared, self.transport, timeout_s, fault)
        return move_as_old(part, self.memory, self.views, self.transport, timeout_s, fault)

    def _release(self, numbers: Sequence[int]) -> int:
        held = self.memory.nbytes_allocated()
        self.memory.empty_scratch()
        self.memory.release(numbers)
        return held

    def _check_derived(self) -> None:
        check_derived(self.layout, self.views, DERIVED)

    def _fill(self) -> sharing.SharedMemory:
        self.memory.fill()
        return self.memory.share()

    def is_right(self) -> bool:
        return all(
            torch.equal(as_integers(view), as_integers(truth(s.tensor)[s.box.slices_in(Box.whole(s.tensor.shape))]))
            for view, s in zip(self.views, self.layout, strict=True)
        )

    def keys_there(self) -> set[Key]:
        """Tensors whose memory is there and not emptied to zeros."""
        return {
            shard.tensor.key
            for view, shard in zip(self.views, self.layout, strict=True)
            if view.numel() and view.untyped_storage().nbytes() and bool(as_integers(view).any())
        }


@dataclass
class Resize:
    """A tight move between two configurations, on as many slots as the larger has ranks."""

    before: ParallelConfig
    after: ParallelConfig
    derived: dict[Key, Key] | None
    pool: ThreadPoolExecutor
    old: list[LocalRank] = field(default_factory=list)
    new: list[LocalRank] = field(default_factory=list)

    def __post_init__(self) -> None:
        source, target = (expected_layouts(MODEL, side) for side in (self.before, self.after))
        self.old = [LocalRank(self.pool, layout, True) for layout in source]
        self.new = [LocalRank(self.pool, layout, False) for layout in target]
        slots = range(max(len(source), len(target)))
        nodes = dict.fromkeys(slots, "node")
        self.plan = make_plan(dict(enumerate(source)), dict(enumerate(target)), nodes, staging_nbytes=256)
        old, new = ({n: rank.memory.allocations for n, rank in enumerate(side)} for side in (self.old, self.new))
        self.phased = cut_in_phases(self.plan, old, new, self.derived)
        self.record = ResizeRecord(1, "requested", self.before, self.after)
        self.members = [self.new[n] if n < len(self.new) else self.old[n] for n in slots]
        group = [GlooTransport(len(slots), n, "tight") for n in slots]
        rendezvous = group[0].rendezvous("127.0.0.1")
        for member, transport in zip(self.members, group, strict=True):
            member.transport = transport
        list(self.pool.map(lambda transport: transport.connect(rendezvous, 20.0), group))
        self.generations = [
            Generation(
                number,
                parallel,
                [Slot(n, cast(Any, None)) for n in range(len(ranks))],
                list(ranks),
                entered=[rank.entered(number == 0) for rank in ranks],
            )
            for number, parallel, ranks in ((0, self.before, self.old), (1, self.after, self.new))
        ]
        old_one, new_one = self.generations
        generations = (old_one, new_one)
        self.move = TightMove(
            self.plan, self.phased, *generations, self.members, "tight", wait, 20.0, self.record, direct_nbytes=1
        )

    def close(self) -> None:
        for member in self.members:
            if member.transport is not None:
                member.transport.destroy_group()


def wait(refs: Sequence[Future[Any]], timeout_s: float, what: str) -> list[Any]:
    return [ref.result(timeout_s) for ref in refs]


@contextmanager
def resize(before: ParallelConfig, after: ParallelConfig, derived: dict[Key, Key] | None = None) -> Iterator[Resize]:
    with ThreadPoolExecutor(4) as pool:
        resize = Resize(before, after, derived, pool)
        try:
            yield resize
        finally:
            resize.close()


@pytest.mark.parametrize(
    ("before", "after", "derived", "is_cast"),
    [
        (DP2, TP2, None, False),
        (DP2, TP2, DERIVED, True),
        (DP2, PLAIN_DP2, DERIVED, False),
        (TP2, TP1, DERIVED, False),
        (TP1, DP2, DERIVED, False),
    ],
    ids=["dp2_to_tp2", "dp2_to_tp2_cast", "zero1_to_plain", "tp2_to_one", "one_to_dp2"],
)
def test_state_arrives_bit_for_bit_and_memory_comes_and_goes_phase_by_phase(
    before: ParallelConfig, after: ParallelConfig, derived: dict[Key, Key] | None, is_cast: bool
) -> None:
    with resize(before, after, derived) as it:
        phases = it.phased.phases
        assert len(phases) > 2
        assert phases[-1].is_cast == is_cast
        seen: list[tuple[set[Key], set[Key]]] = []

        def look(event: str) -> None:
            if event == "moved":
                sides = [set().union(*(r.keys_there() for r in side)) for side in (it.old, it.new)]
                seen.append((sides[0], sides[1]))

        it.new[0].faults = [look] * len(phases)
        it.move.carry_out()
        assert all(rank.is_right() for rank in it.new)
        dropped = set(phases[-1].tensors) if is_cast else set()
        for index, (in_old, in_new) in enumerate(seen):
            coming = set().union(*(phase.tensors for phase in phases[index:]))
            assert in_old == coming - dropped
            assert in_new <= set().union(*(phase.tensors for phase in phases[: index + 1]))
        assert it.record.nbytes_peak is not None
        # On CPUs there is one staging buffer each way, not three.
        assert (it.phased.peak - it.phased.staging).max() <= it.record.nbytes_peak <= it.phased.peak.max()
        assert all(rank.keys_there() == set() and not rank.gradients.untyped_storage().nbytes() for rank in it.old)
        for rank in it.new:
            assert rank.gradients.tolist() == [0.0] * 5
            flat = torch.empty(0, dtype=torch.uint8).set_(rank.views[0].untyped_storage())
            assert (flat[-PADDING:] == 7).all()  # what lies beside the views is as it was built
        # What the new generation holds can be mapped in its turn.
        for rank, entered in zip(it.new, it.generations[1].entered, strict=True):
            assert entered.shared is not None
            mapped = sharing.open(entered.shared)
            assert all(torch.equal(a, b) for a, b in zip(mapped, rank.views, strict=True))


def test_wrong_certificate_before_anything_was_released_leaves_the_old_generation_whole() -> None:
    with resize(DP2, PLAIN_DP2) as it:
        shard = it.phased.phases[0].positions(it.new[1].layout)[0]
        it.new[1].faults = [FaultInjector([Fault("moved", "corrupt", shard)], it.new[1].views)]
        with pytest.raises(CertificateError, match="1 moves failed"):
            it.move.carry_out()
        assert not it.move.is_past_return
        assert all(rank.is_right() for rank in it.old)


def test_wrong_certificate_later_says_where_the_state_is() -> None:
    with resize(DP2, TP2, DERIVED) as it:
        shard = it.phased.phases[1].positions(it.new[1].layout)[0]
        it.new[1].faults = [lambda event: None, FaultInjector([Fault("moved", "corrupt", shard)], it.new[1].views)]
        where = (
            rf"phase 2 of {len(it.phased.phases)} of a tight handover failed: CertificateError: 1 moves .*"
            rf"{len(it.phased.phases[0].tensors)} tensors? .* only in the new generation, "
            rf"{2 * len(PARTS) - len(it.phased.phases[0].tensors)} only in the old one; "
            rf"{len(PARTS)} are to be made from their main weights"
        )
        with pytest.raises(StateLost, match=where):
            it.move.carry_out()
        assert it.move.is_past_return


def test_weights_that_are_not_their_main_weights_stop_it_before_anything_is_released() -> None:
    with resize(DP2, TP2, DERIVED) as it:
        wrong, position = next(
            (rank, position)
            for rank in it.old
            for position, shard in enumerate(rank.layout)
            if shard.tensor.key == ("main_param", "3.q")
        )
        wrong.views[position].view(-1)[0] += 1.0
        with pytest.raises(ValueError, match=r"param 3\.q is not its main weight, rounded"):
            it.move.carry_out()
        assert not it.move.is_past_return
        assert all(rank.is_right() for rank in it.old if rank is not wrong)


def test_planner_and_ranks_agree_on_staging() -> None:
    assert (planned_memory.ALIGNMENT, planned_memory.STAGING_BUFFERS) == (ALIGNMENT, BUFFERS)


def fails(*arguments: Any) -> Any:
    raise MemoryError("no room")


@pytest.mark.parametrize(
    ("side", "method", "where"), [("old", "_release", "phase 1 of"), ("new", "_fill", "what follows the phases")]
)
def test_whatever_fails_after_the_first_release_has_lost_the_state(side: str, method: str, where: str) -> None:
    with resize(ParallelConfig(data_parallel=2), ParallelConfig(tensor_parallel=2), DERIVED) as tight:
        setattr(getattr(tight, side)[-1], method, fails)
        with pytest.raises(StateLost, match=rf"{where}.* of a tight handover failed: MemoryError: no room"):
            tight.move.carry_out()
        assert tight.move.is_past_return
