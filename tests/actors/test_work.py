"""What travels as one buffer, and what goes straight from its view: alike on both ends, whatever the strides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from moves import MODEL, Layouts, part_of, plan_between, same_bytes, tensor_parallel, views_for

from ray_etc.actors.sums import as_integers
from ray_etc.actors.work import Work
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import RankLayout, Shard
from ray_etc.planners.memory import STAGING_BUFFERS, staging_of
from ray_etc.planners.plan import MigrationPlan
from ray_etc.planners.rank_plan import Move


def either(
    source: Callable[[Move], torch.Tensor], relay: Callable[[Move], torch.Tensor]
) -> Callable[..., torch.Tensor]:
    return lambda move: relay(move) if move.is_relay else source(move)


def slice_of(views: list[torch.Tensor], layout: RankLayout, end: str) -> Callable[[Move], torch.Tensor]:
    def of(move: Move) -> torch.Tensor:
        shard = getattr(move, f"{end}_shard")
        return as_integers(views[shard])[move.box.slices_in(layout[shard].box)]

    return of


def works(
    plan: MigrationPlan,
    contiguous: tuple[bool, bool],
    direct_nbytes: int | None,
    buffer_count: int,
    reads_back: bool = True,
) -> tuple[list[Work], list[list[torch.Tensor]]]:
    """The work of every rank, and the targets that it writes to."""
    made, targets = [], []
    for rank in range(len(plan.slots)):
        target = views_for(plan.target[rank], False, contiguous[1])
        held = slice_of(views_for(plan.source[rank], True, contiguous[0]), plan.source[rank], "src")
        source_of = either(held, slice_of(target, plan.target[rank], "src"))
        target_of = slice_of(target, plan.target[rank], "dst")
        part, cpu = plan.for_rank(rank), torch.device("cpu")
        made.append(Work(part, source_of, target_of, cpu, direct_nbytes, buffer_count, reads_back))
        targets.append(target)
    return made, targets


@pytest.mark.parametrize("contiguous", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("direct_nbytes", [None, 1, 30, 10_000])
@pytest.mark.parametrize(("buffer_count", "reads_back"), [(1, False), (3, True)])
def test_both_ends_cut_every_message_alike(
    contiguous: tuple[bool, bool], direct_nbytes: int | None, buffer_count: int, reads_back: bool
) -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL), tensor_parallel(3, 1, MODEL), staging_nbytes=96)
    made, targets = works(plan, contiguous, direct_nbytes, buffer_count, reads_back)
    for work in made:
        work.local.run()
        work.local_arrived.run()
    for index in range(len(plan.rounds)):
        rounds = [work.rounds[index] for work in made]
        for here in rounds:
            here.pack.run()
        for sender, here in enumerate(rounds):
            for receiver, buffers in here.sends.items():
                into = rounds[receiver].receives[sender]
                assert [buffer.numel() for buffer in buffers] == [buffer.numel() for buffer in into]
                for buffer, other in zip(buffers, into, strict=True):
                    other.copy_(buffer)
        for here in rounds:
            here.unpack.run()
            here.check.run()
    for rank, views in enumerate(targets):
        assert all(same_bytes(view, part_of(shard)) for view, shard in zip(views, plan.target[rank], strict=True))
    sums = [work.fetch_sums() for work in made]
    for rank, ends in enumerate(sums):
        for (end, index, peer), left in ends.items():
            if end == "left":
                arrived = ends["arrived", -1, rank] if index < 0 else sums[peer]["arrived", index, rank]
                assert left.tolist() == arrived.tolist()


def test_large_slice_in_one_run_is_not_packed() -> None:
    spec = MODEL[0]
    halves: Layouts = {rank: (Shard(spec, Box((6 * rank, 0), (6, 6))),) for rank in range(2)}
    whole: Layouts = {rank: (Shard(spec, Box.whole(spec.shape)),) for rank in range(2)}
    plan = plan_between(halves, whole)
    [move] = plan.for_rank(0).rounds[0].sends[1]
    for direct_nbytes, packed in ((move.nbytes, 0), (move.nbytes + 1, 80)):
        made, _ = works(plan, (True, True), direct_nbytes, 1)
        [buffer] = made[0].rounds[0].sends[1]
        assert buffer.numel() == (packed if packed else move.nbytes)
        assert made[0].staging_nbytes == 2 * packed
    made, _ = works(plan, (False, True), move.nbytes, 1)
    assert made[0].staging_nbytes == 80


@pytest.mark.parametrize("direct_nbytes", [None, 1, 30, 10_000])
@pytest.mark.parametrize("staging_nbytes", [96, 4096])
def test_staging_is_as_large_as_the_plan_expects_it(direct_nbytes: int | None, staging_nbytes: int) -> None:
    whole = tuple(Shard(spec, Box.whole(spec.shape)) for spec in MODEL)
    columns, rows = tensor_parallel(3, 1, MODEL), tensor_parallel(2, 0, MODEL)
    relayed: tuple[Layouts, Layouts] = ({0: whole, 1: (), 2: ()}, dict.fromkeys(range(3), whole))
    for source, target in ((rows, columns), (columns, rows), relayed):
        plan = plan_between(source, target, staging_nbytes)
        for rank, expected in enumerate(staging_of(plan, direct_nbytes).tolist()):
            held, wanted = plan.source[rank], plan.target[rank]
            old, new = ([part_of(shard).contiguous() for shard in layout] for layout in (held, wanted))
            source_of = either(slice_of(old, held, "src"), slice_of(new, wanted, "src"))
            ends = source_of, slice_of(new, wanted, "dst")
            work = Work(plan.for_rank(rank), *ends, torch.device("cpu"), direct_nbytes, STAGING_BUFFERS, True)
            assert work.staging_nbytes == expected


def test_rounds_with_relays_say_so() -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL[:1]), tensor_parallel(2, 1, MODEL[:1]))
    made, _ = works(plan, (True, True), None, 1)
    assert [each.has_relays for each in made[0].rounds] == [False]
