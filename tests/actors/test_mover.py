from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moves import (
    DAMAGES,
    MODEL,
    TWINS,
    Layouts,
    part_of,
    plan_between,
    same_bytes,
    tensor_parallel,
    views_for,
)
from processes import Board, join_group, run_processes

from ray_etc.actors.certificate import compare
from ray_etc.actors.errors import CertificateError, TransportError
from ray_etc.actors.faults import Fault, FaultInjector
from ray_etc.actors.mover import Mover, MoveReport
from ray_etc.actors.transports import GlooTransport
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import Shard, TensorSpec
from ray_etc.planners.plan import MigrationPlan

WORLD = 3


def move_in_threads(
    plan: MigrationPlan,
    contiguous: bool,
    on_event: Callable[[str], None] = lambda event: None,
    kinds: dict[int, type[Mover]] | None = None,
) -> Any:
    """Every rank of the plan as a thread with a gloo group of its own; the reports, and whether all bytes are right."""
    world = len(plan.slots)
    group = [GlooTransport(world, rank, "threads") for rank in range(world)]
    rendezvous = group[0].rendezvous("127.0.0.1")

    def one(rank: int) -> tuple[MoveReport, bool]:
        group[rank].connect(rendezvous, 20.0)
        source, target = plan.source[rank], plan.target[rank]
        targets = views_for(target, filled=False, contiguous=not contiguous)
        kind = (kinds or {}).get(rank, Mover)
        views = views_for(source, True, contiguous)
        mover = kind(plan.for_rank(rank), group[rank], views, source, targets, target, "cpu")
        report = mover.run(20.0, on_event)
        mover.close()
        return report, all(same_bytes(view, part_of(shard)) for view, shard in zip(targets, target, strict=True))

    try:
        with ThreadPoolExecutor(world) as pool:
            return list(pool.map(one, range(world)))
    finally:
        for transport in group:
            transport.destroy_group()


@st.composite
def layouts(draw: st.DrawFn, specs: list[TensorSpec]) -> Layouts:
    """Each tensor cut along any dim into parts for any of the ranks, some of them held twice."""
    held: dict[int, list[Shard]] = {rank: [] for rank in range(WORLD)}
    for spec in specs:
        boxes = [Box.whole(spec.shape)]
        if spec.shape and min(spec.shape) > 0:
            dim = draw(st.integers(0, len(spec.shape) - 1))
            length = spec.shape[dim]
            cuts = [0, *sorted(draw(st.sets(st.integers(1, length - 1), max_size=2)) if length > 1 else ()), length]
            boxes = []
            for start, stop in pairwise(cuts):
                offsets, lengths = [0] * len(spec.shape), list(spec.shape)
                offsets[dim], lengths[dim] = start, stop - start
                boxes.append(Box(tuple(offsets), tuple(lengths)))
        for box in boxes:
            for rank in draw(st.sets(st.integers(0, WORLD - 1), min_size=1, max_size=2)):
                held[rank].append(Shard(spec, box))
    return {rank: tuple(shards) for rank, shards in held.items()}


@settings(max_examples=25)
@given(layouts(MODEL), layouts(MODEL), st.booleans(), st.sampled_from([64, 4096]))
def test_any_layout_to_any_other_is_equal_byte_by_byte(
    source: Layouts, target: Layouts, contiguous: bool, staging_nbytes: int
) -> None:
    plan = plan_between(source, target, staging_nbytes)
    results = move_in_threads(plan, contiguous)
    assert all(good for _, good in results)
    reports = [report for report, _ in results]
    compare(plan, reports)
    assert sum(report.nbytes_local for report in reports) == plan.nbytes_local
    assert sum(report.nbytes_sent for report in reports) == plan.nbytes_wire
    assert sum(report.nbytes_received for report in reports) == plan.nbytes_wire


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("staging_nbytes", [64, 4096])
def test_relays_pass_on_what_an_earlier_round_brought(contiguous: bool, staging_nbytes: int) -> None:
    whole = tuple(Shard(spec, Box.whole(spec.shape)) for spec in MODEL)
    plan = plan_between({0: whole, 1: (), 2: ()}, dict.fromkeys(range(3), whole), staging_nbytes)
    assert sum(move.is_relay for moves in plan.rounds for move in moves) >= len(MODEL) - 1
    results = move_in_threads(plan, contiguous)
    assert all(good for _, good in results)
    compare(plan, [report for report, _ in results])


def test_relay_of_damaged_bytes_is_told_where_they_were_damaged() -> None:
    whole = tuple(Shard(spec, Box.whole(spec.shape)) for spec in MODEL[:1])
    plan = plan_between({0: whole, 1: (), 2: ()}, dict.fromkeys(range(3), whole), 4096)
    assert [{move.dst_rank for move in moves} for moves in plan.rounds] == [{1}, {2}]
    outcomes = run_processes(3, process_body, plan, {1: Fault("round:0:unpacked", "corrupt")})
    with pytest.raises(CertificateError) as caught:
        compare(plan, [outcome.value[0] for outcome in outcomes])
    assert caught.value.count == 1
    assert "from rank 0 to rank 1" in str(caught.value)
    assert [outcome.value[1] for outcome in outcomes] == [True, False, False]


def process_body(rank: int, board: Board, plan: MigrationPlan, faults: dict[int, Fault]) -> tuple[MoveReport, bool]:
    transport = join_group(rank, board, len(plan.slots))
    source, target = plan.source[rank], plan.target[rank]
    targets = views_for(target, filled=False)
    mover = Mover(plan.for_rank(rank), transport, views_for(source, True), source, targets, target)
    mover.prepare()
    report = mover.run(20.0, FaultInjector([faults[rank]] if rank in faults else [], targets))
    transport.destroy_group()
    return report, all(same_bytes(view, part_of(shard)) for view, shard in zip(targets, target, strict=True))


def test_tp2_to_tp3_and_back_in_real_processes() -> None:
    for old, new in ((2, 3), (3, 2)):
        plan = plan_between(tensor_parallel(old, 0, MODEL), tensor_parallel(new, 1, MODEL), staging_nbytes=128)
        assert len(plan.rounds) > 1
        outcomes = run_processes(3, process_body, plan, {})
        assert [outcome.error for outcome in outcomes] == [None] * 3
        assert all(outcome.value[1] for outcome in outcomes)
        compare(plan, [outcome.value[0] for outcome in outcomes])


def test_corrupted_byte_is_caught_and_named() -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL), tensor_parallel(3, 1, MODEL))
    outcomes = run_processes(3, process_body, plan, {2: Fault("moved", "corrupt", shard=1)})
    with pytest.raises(CertificateError) as caught:
        compare(plan, [outcome.value[0] for outcome in outcomes])
    assert caught.value.count == 1
    assert "exp_avg embed[" in str(caught.value)
    assert "to rank 2" in str(caught.value)


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_in_transit_is_caught_and_named(kind: type[Mover]) -> None:
    plan = plan_between(tensor_parallel(2, 0, TWINS), tensor_parallel(2, 1, TWINS), staging_nbytes=4096)
    results = move_in_threads(plan, True, kinds={1: kind})
    with pytest.raises(CertificateError, match="to rank 1") as caught:
        compare(plan, [report for report, _ in results])
    assert caught.value.count == DAMAGES[kind]
    assert [good for _, good in results] == [True, False]


def test_process_killed_between_two_rounds_ends_the_others_with_an_error() -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL), tensor_parallel(3, 1, MODEL), staging_nbytes=64)
    assert len(plan.rounds) > 2
    outcomes = run_processes(3, process_body, plan, {1: Fault("round:1:packed", "kill")})
    assert outcomes[1].exit_code == -signal.SIGKILL
    for rank in (0, 2):
        assert isinstance(outcomes[rank].error, TransportError)


def test_error_raised_at_an_event_reaches_the_caller() -> None:
    plan = plan_between(tensor_parallel(1, 0, MODEL), tensor_parallel(1, 0, MODEL))
    views = views_for(plan.target[0], filled=False)
    mover = Mover(plan.for_rank(0), None, views_for(plan.source[0], True), plan.source[0], views, plan.target[0])
    with pytest.raises(RuntimeError, match="local:done"):
        mover.run(5.0, FaultInjector([Fault("local:done", "raise")]))


def test_events_come_in_order() -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL[:1]), tensor_parallel(2, 1, MODEL[:1]))
    events: list[str] = []
    move_in_threads(plan, True, events.append)
    assert len(events) == 12
    assert [*dict.fromkeys(events)] == [
        "local:done",
        "round:0:packed",
        "round:0:received",
        "round:0:unpacked",
        "moved",
        "certified",
    ]


def test_report_that_is_missing_or_short_fails_the_certificate() -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL), tensor_parallel(2, 1, MODEL))
    reports = [report for report, _ in move_in_threads(plan, True)]
    compare(plan, reports)
    with pytest.raises(CertificateError, match="not carried out at its source"):
        compare(plan, reports[1:])
    key = next(iter(reports[0].received))
    short = dataclasses.replace(reports[0], received={**reports[0].received, key: reports[0].received[key][:-1]})
    with pytest.raises(CertificateError, match="not carried out at its destination") as caught:
        compare(plan, [short, reports[1]])
    assert caught.value.count == len(reports[0].received[key])


def test_views_that_do_not_fit_their_layout_are_refused() -> None:
    plan = plan_between(tensor_parallel(1, 0, MODEL[:1]), tensor_parallel(1, 0, MODEL[:1]))
    good = views_for(plan.source[0], filled=True)
    for wrong in ([], [good[0][:3]], [good[0].float()]):
        with pytest.raises(ValueError, match="rank 0, source"):
            Mover(plan.for_rank(0), None, wrong, plan.source[0], good, plan.target[0])


def test_messages_without_a_transport_are_refused() -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL[:1]), tensor_parallel(2, 1, MODEL[:1]))
    views = views_for(plan.source[0], True)
    with pytest.raises(ValueError, match="no transport"):
        Mover(plan.for_rank(0), None, views, plan.source[0], views_for(plan.target[0], False), plan.target[0])
