"""ETC_NCCL and CUDA IPC in real processes. With one GPU, its two members pass for two hosts."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moves import DAMAGES, MODEL, TWINS, part_of, plan_between, same_bytes, tensor_parallel, views_for
from processes import Board, join_group, run_processes, wait_gone
from slices import HOWS, memory

from ray_etc.actors import sharing
from ray_etc.actors.certificate import compare
from ray_etc.actors.errors import CertificateError, TransportError, TransportTimeout
from ray_etc.actors.faults import Fault, FaultInjector
from ray_etc.actors.mover import Mover, MoveReport
from ray_etc.actors.passes import Job, Pass
from ray_etc.actors.pipeline import BUFFERS
from ray_etc.actors.sums import weighted_sum
from ray_etc.actors.transports import NcclTransport, Transport
from ray_etc.actors.transports.base import Deadline, Rendezvous
from ray_etc.planners.boxes import Box
from ray_etc.planners.layout import Shard, TensorSpec
from ray_etc.planners.plan import MigrationPlan

WHY_NOT = NcclTransport.why_unavailable()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))]

MIB = 1 << 20


def join(rank: int, board: Board, world_size: int = 2, name: str = "group") -> Transport:
    gpus = torch.cuda.device_count()
    os.environ.update(NCCL_NVLS_ENABLE="0", NCCL_SOCKET_IFNAME="lo")
    if gpus < world_size:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    torch.cuda.set_device(rank % gpus)
    return join_group(rank, board, world_size, name, 60.0, NcclTransport)


def is_device_usable() -> bool:
    product = torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    torch.cuda.synchronize()
    return bool(torch.isfinite(product).all())


def ordered_body(rank: int, board: Board) -> list[bool]:
    transport, peer = join(rank, board), 1 - rank
    good = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for round_number in range(5):
            message = torch.zeros(16 * MIB, dtype=torch.uint8, device="cuda")
            torch.cuda._sleep(20_000_000)
            message.fill_(10 * round_number + rank + 1)
            buffer = torch.zeros_like(message)
            transport.exchange({peer: message}, {peer: buffer}, 30.0)
            good.append(bool((buffer == 10 * round_number + peer + 1).all()))
    transport.exchange({peer: message[:0]}, {peer: buffer[:0]}, 5.0)
    transport.destroy_group()
    return good


def test_exchange_is_ordered_with_torchs_current_stream_both_ways() -> None:
    assert [outcome.value for outcome in run_processes(2, ordered_body, timeout_s=120)] == [[True] * 5] * 2


def collectives_body(rank: int, board: Board) -> list[Any]:
    transport = join(rank, board)
    ours = torch.full((3,), float(rank + 1), dtype=torch.bfloat16, device="cuda")
    transport.allreduce([ours])
    gathered = [torch.empty(1, device="cuda") for _ in range(2)]
    transport.allgather([gathered], [torch.tensor([float(rank)], device="cuda")])
    scattered = torch.empty(1, device="cuda")
    transport.reducescatter([scattered], [[torch.tensor([float(part)], device="cuda") for part in range(2)]])
    root = torch.tensor([float(rank + 7)], device="cuda")
    transport.broadcast([root])
    transport.barrier()
    transport.destroy_group()
    return [float(ours[0]), [float(each) for each in gathered], float(scattered), float(root)]


def test_collectives_that_users_of_rays_registry_expect() -> None:
    values = [outcome.value for outcome in run_processes(2, collectives_body, timeout_s=120)]
    assert values == [[3.0, [0.0, 1.0], 0.0, 7.0], [3.0, [0.0, 1.0], 2.0, 7.0]]


def broken_body(rank: int, board: Board, how: str) -> tuple[str, float, bool, bool]:
    transport = join(rank, board)
    if rank == 1 and how == "killed":
        board.get("waiting")
        os.kill(os.getpid(), signal.SIGKILL)
    kind, seconds, usable = "", 0.0, True
    if rank == 0:
        if how == "aborted":
            threading.Timer(1.0, transport.abort).start()
        board.put("waiting")
        start = time.monotonic()
        timeout_s = 50.0 if how == "aborted" else 2.0
        with pytest.raises(TransportError) as caught:
            transport.exchange({}, {1: torch.empty(MIB, dtype=torch.uint8, device="cuda")}, timeout_s)
        kind, seconds = type(caught.value).__name__, time.monotonic() - start
        usable = is_device_usable()
        if how == "killed":
            return kind, seconds, usable, True
        board.put("over")
    board.get("over")
    transport.destroy_group()
    again = join(rank, board, name="again")
    buffer = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    again.exchange({1 - rank: torch.full_like(buffer, rank)}, {1 - rank: buffer}, 30.0)
    return kind, seconds, usable, bool((buffer == 1 - rank).all())


@pytest.mark.parametrize("how", ["silent", "aborted", "killed"])
def test_broken_exchange_ends_in_time_and_leaves_the_gpu_usable(how: str) -> None:
    outcome = run_processes(2, broken_body, how, timeout_s=120)[0]
    assert outcome.error is None
    kind, seconds, usable, works_again = outcome.value
    assert usable
    assert works_again
    assert seconds < 5.0
    if how == "silent":
        assert kind == TransportTimeout.__name__
    if how == "aborted":
        assert kind == TransportError.__name__


class Late(NcclTransport):
    """Comes to the meeting, but to NCCL's own set-up only after the others have given up."""

    def _meet(self, meeting: Rendezvous, deadline: Deadline) -> dist.Store:
        store = super()._meet(meeting, deadline)
        BOARDS[0].get("gave up")
        return store


BOARDS: list[Board] = []


def late_body(rank: int, board: Board) -> tuple[str, bool, bool]:
    BOARDS.append(board)
    join(rank, board, name="warm").destroy_group()
    transport = (Late if rank else NcclTransport)(2, rank, "late")
    if rank == 0:
        board.put("late", transport.rendezvous("127.0.0.1"))
    with pytest.raises(TransportError) as caught:
        transport.connect(board.get("late"), 8.0 if rank else 2.0)
    board.put("gave up")
    for thread in threading.enumerate():
        if thread.name == "connect late":
            thread.join(20.0)
    is_over = not any(thread.name == "connect late" for thread in threading.enumerate())
    again = join(rank, board, name="again")
    buffer = torch.empty(MIB, dtype=torch.uint8, device="cuda")
    again.exchange({1 - rank: torch.full_like(buffer, rank)}, {1 - rank: buffer}, 30.0)
    again.destroy_group()
    return str(caught.value), is_over, bool((buffer == 1 - rank).all())


def test_communicator_that_comes_after_its_deadline_is_taken_down() -> None:
    outcomes = run_processes(2, late_body, timeout_s=120)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert "hangs while it connects" in outcomes[0].value[0]
    assert [outcome.value[1:] for outcome in outcomes] == [(True, True)] * 2


def move_body(
    rank: int,
    board: Board,
    plan: MigrationPlan,
    direct_nbytes: int,
    faults: dict[int, Fault],
) -> tuple[MoveReport, bool]:
    transport = join(rank, board, len(plan.slots))
    source, target = plan.source[rank], plan.target[rank]
    sources = [view.cuda() for view in views_for(source, filled=True, contiguous=False)]
    targets = [view.cuda() for view in views_for(target, filled=False)]
    mover = Mover(plan.for_rank(rank), transport, sources, source, targets, target, "cuda", direct_nbytes)
    mover.prepare()
    report = mover.run(20.0, FaultInjector([faults[rank]] if rank in faults else [], targets))
    # As the driver does: nobody leaves the group while another still needs it.
    board.put(f"moved {rank}")
    for peer in transport.peers:
        board.get(f"moved {peer}")
    transport.destroy_group()
    return report, all(same_bytes(view.cpu(), part_of(shard)) for view, shard in zip(targets, target, strict=True))


@pytest.mark.parametrize(("old", "new"), [(1, 2), (2, 1), (2, 4), (4, 2)])
@pytest.mark.parametrize("direct_nbytes", [16, 1 << 30])
def test_tensor_parallel_moves_are_equal_byte_by_byte(old: int, new: int, direct_nbytes: int) -> None:
    plan = plan_between(tensor_parallel(old, 0, MODEL), tensor_parallel(new, 1, MODEL), staging_nbytes=48)
    assert len(plan.rounds) > BUFFERS
    outcomes = run_processes(max(old, new), move_body, plan, direct_nbytes, {}, timeout_s=150)
    assert [outcome.error for outcome in outcomes] == [None] * len(outcomes)
    assert all(outcome.value[1] for outcome in outcomes)
    compare(plan, [outcome.value[0] for outcome in outcomes])


def relaying(numel: int) -> MigrationPlan:
    """Rank 0's tensors to ranks 1 and 2, who hand half of them on to each other in later rounds."""
    specs = [TensorSpec("param", f"weight{index}", (numel // 1000, 1000), "float32", 4) for index in range(4)]
    whole = tuple(Shard(spec, Box.whole(spec.shape)) for spec in specs)
    return plan_between({0: whole, 1: (), 2: ()}, dict.fromkeys(range(3), whole), numel * 2)


def test_relays_wait_for_what_they_pass_on() -> None:
    plan = relaying(2_000_000)
    outcomes = run_processes(3, move_body, plan, 1 << 30, {}, timeout_s=150)
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert all(outcome.value[1] for outcome in outcomes)
    compare(plan, [outcome.value[0] for outcome in outcomes])


def damages_body(rank: int, board: Board, plan: MigrationPlan) -> list[MoveReport]:
    transport = join(rank, board)
    source, target = plan.source[rank], plan.target[rank]
    sources = [view.cuda() for view in views_for(source, filled=True)]
    reports = []
    for kind in DAMAGES:
        targets = [view.cuda() for view in views_for(target, filled=False)]
        mover = (kind if rank == 1 else Mover)(plan.for_rank(rank), transport, sources, source, targets, target)
        reports.append(mover.run(20.0))
    board.put(f"moved {rank}")
    board.get(f"moved {1 - rank}")
    transport.destroy_group()
    return reports


def test_damage_in_transit_is_caught_and_named() -> None:
    plan = plan_between(tensor_parallel(2, 0, TWINS), tensor_parallel(2, 1, TWINS), staging_nbytes=4096)
    outcomes = run_processes(2, damages_body, plan, timeout_s=150)
    assert [outcome.error for outcome in outcomes] == [None, None]
    for kind, *reports in zip(DAMAGES, *(outcome.value for outcome in outcomes), strict=True):
        with pytest.raises(CertificateError, match="to rank 1") as caught:
            compare(plan, reports)
        assert caught.value.count == DAMAGES[kind], kind


def test_byte_damaged_in_the_target_is_caught_where_it_was_not_packed() -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL), tensor_parallel(2, 1, MODEL))
    outcomes = run_processes(2, move_body, plan, 1, {1: Fault("round:0:unpacked", "corrupt", shard=6)}, timeout_s=150)
    with pytest.raises(CertificateError) as caught:
        compare(plan, [outcome.value[0] for outcome in outcomes])
    assert caught.value.count == 1
    assert "to rank 1" in str(caught.value)


@pytest.mark.parametrize("action", ["kill", "raise"])
def test_peer_that_fails_between_two_rounds_ends_the_other_with_an_error(action: Any) -> None:
    plan = plan_between(tensor_parallel(2, 0, MODEL), tensor_parallel(2, 1, MODEL), staging_nbytes=64)
    assert len(plan.rounds) > 2
    outcomes = run_processes(2, move_body, plan, 1 << 30, {1: Fault("round:1:packed", action)}, timeout_s=150)
    assert isinstance(outcomes[0].error, TransportError)
    if action == "kill":
        assert outcomes[1].exit_code == -signal.SIGKILL
    else:
        assert "injected fault" in str(outcomes[1].error)


def test_kernel_copies_and_sums_as_a_cpu_does() -> None:
    torch.manual_seed(3)
    for itemsize, how, into in itertools.product((1, 2, 4, 8), HOWS, HOWS):
        shapes = [[3, 129, 256], [5], [1, 7, 1], [4, 2, 3, 5], [700, 9], []]
        sources = [memory(shape, itemsize, how, True) for shape in shapes]
        targets = [memory(shape, itemsize, into, False) for shape in shapes]
        there = [view.cuda() if how != "gaps" else _with_gaps(view) for view in sources]
        here = [view.cuda() if into != "gaps" else _with_gaps(view) for view in targets]
        totals = torch.zeros(3 * len(shapes), dtype=torch.int64, device="cuda")
        count = len(shapes)
        Pass([Job(*ends, n, count + n) for n, ends in enumerate(zip(there, here, strict=True))], totals).run()
        Pass([Job(None, b, arrived=n) for n, b in enumerate(here, 2 * count)], totals, share=0.1).run()
        assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(sources, here, strict=True))
        expected = [weighted_sum(view) for view in sources]
        assert totals.tolist() == expected * 3


def _with_gaps(view: torch.Tensor) -> torch.Tensor:
    """The same on the GPU, with as much room beside each element: `cuda()` would close the gaps."""
    room = torch.zeros([2 * n for n in view.shape], dtype=view.dtype, device="cuda")
    inner = room[tuple(slice(0, 2 * n, 2) for n in view.shape)]
    inner.copy_(view)
    return inner


def sharing_body(rank: int, board: Board) -> Any:
    torch.cuda.set_device(0)
    if rank == 0:
        buffer = torch.arange(4 * MIB, dtype=torch.float32, device="cuda")
        parameter = torch.nn.Parameter(torch.empty(0, device="cuda"))
        parameter.data = buffer[MIB : 2 * MIB].view(1024, 1024)
        torch.cuda.synchronize()
        # As every rank does when its generation starts. The first time makes torch's streams, and CUDA lets that wait.
        sharing.share([parameter])
        # A kernel that runs for seconds on the default stream must hold up neither the owner nor the reader.
        torch.cuda._sleep(10_000_000_000)
        start = time.monotonic()
        shared = sharing.share([parameter, parameter.t()[:, :7]])
        board.put("shared", pickle.dumps((os.getpid(), time.monotonic() - start, shared)))
        board.get("opened")
        os.kill(os.getpid(), signal.SIGKILL)
    owner, shared_s, shared = pickle.loads(board.get("shared"))
    start = time.monotonic()
    views = sharing.open(shared)
    live = [float(views[0][0, 0]), float(views[1][3, 1])]
    opened_s = time.monotonic() - start
    board.put("opened")
    wait_gone(owner)
    after = [float(views[0][0, 0]), float(views[1][3, 1])]
    del views
    return shared_s, opened_s, live, after, len(shared.storages), is_device_usable()


def test_shared_memory_outlives_its_owner_and_waits_for_no_kernel() -> None:
    owner, reader = run_processes(2, sharing_body, timeout_s=120)
    assert owner.exit_code == -signal.SIGKILL
    assert reader.error is None
    shared_s, opened_s, live, after, storages, usable = reader.value
    assert shared_s < 2.0
    assert opened_s < 2.0
    assert live == after == [float(MIB), float(MIB + 1024 + 3)]
    assert storages == 1
    assert usable
