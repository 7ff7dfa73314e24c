from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Board, join_group, run_processes

from ray_etc.actors.errors import CertificateError, TransportError, TransportTimeout
from ray_etc.actors.transports import GlooTransport, NcclTransport, Transport, nccl, register


def message(source: int, destination: int, nbytes: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * source + destination)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def exchange_with_all(transport: Transport, nbytes: int, timeout_s: float = 20.0) -> bool:
    """All members at once; whether each message is the one that its sender meant for this member."""
    rank = transport.rank
    receives = {peer: torch.empty(nbytes * (peer + 1), dtype=torch.uint8) for peer in transport.peers}
    sends = {peer: message(rank, peer, nbytes * (rank + 1)) for peer in transport.peers}
    transport.exchange(sends, receives, timeout_s)
    return all(torch.equal(got, message(peer, rank, got.numel())) for peer, got in receives.items())


def exchange_body(rank: int, board: Board) -> list[bool]:
    transport = join_group(rank, board, 3)
    good = [exchange_with_all(transport, nbytes) for nbytes in (1, 0, 1 << 20, 4097)]
    transport.destroy_group()
    return good


def test_exchange_of_three_members_with_messages_of_many_sizes() -> None:
    assert [outcome.value for outcome in run_processes(3, exchange_body)] == [[True] * 4] * 3


def subset_body(rank: int, board: Board) -> tuple[bool, float]:
    store = dist.TCPStore("127.0.0.1", int(board.get("port")), None, False) if rank else None
    if store is None:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        board.put("port", str(store.port).encode())
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=20))
    world = dist.group.WORLD
    good = True
    if rank >= 2:
        transport = join_group(rank - 2, board, 2)
        good = exchange_with_all(transport, 1 << 16)
        transport.destroy_group()
    total = torch.full((4,), float(rank))
    dist.all_reduce(total)
    good &= dist.group.WORLD is world and dist.get_world_size() == 4
    dist.barrier()
    dist.destroy_process_group()
    return good, float(total[0])


def test_subset_of_the_processes_beside_torchs_default_group() -> None:
    assert [outcome.value for outcome in run_processes(4, subset_body)] == [(True, 6.0)] * 4


def lonely_body(rank: int, board: Board) -> TransportError | None:
    if rank == 2:
        return None
    board.put(f"{rank} is up")
    board.get(f"{1 - rank} is up")  # however long that takes on a busy machine
    with pytest.raises(TransportTimeout) as caught:
        join_group(rank, board, 3, timeout_s=2.0)
    board.put(f"{rank} gave up")
    board.get(f"{1 - rank} gave up")  # the store, where both wait, is member 0's
    return caught.value


def test_connect_names_the_peer_that_never_joined() -> None:
    for outcome in run_processes(3, lonely_body)[:2]:
        assert outcome.error is None
        assert outcome.value.peers == (2,)
        assert 1.9 < outcome.value.seconds < 6.0


def silent_body(rank: int, board: Board) -> float:
    transport = join_group(rank, board, 2)
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(TransportTimeout) as caught:
            transport.exchange({}, {1: torch.empty(8, dtype=torch.uint8)}, 1.0)
        assert caught.value.peers == (1,)
        with pytest.raises(TransportError, match="aborted before"):
            transport.exchange({}, {1: torch.empty(8, dtype=torch.uint8)}, 1.0)
        board.put("timed out")
    else:
        board.get("timed out")
    return time.monotonic() - start


def test_exchange_with_a_silent_peer_ends_at_its_deadline() -> None:
    outcome = run_processes(2, silent_body)[0]
    assert outcome.error is None
    assert 0.9 < outcome.value < 3.0


def killed_body(rank: int, board: Board) -> float:
    transport = join_group(rank, board, 2)
    exchange_with_all(transport, 64)
    if rank == 1:
        board.get("exchange begins")
        os.kill(os.getpid(), signal.SIGKILL)
    # Far more than the sockets hold, to a peer that takes nothing: the exchange cannot be over when the peer dies.
    big = torch.zeros(1 << 28, dtype=torch.uint8)
    board.put("exchange begins")
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        transport.exchange({1: big}, {1: torch.empty(8, dtype=torch.uint8)}, 50.0)
    assert not isinstance(caught.value, TransportTimeout)
    assert caught.value.peers == (1,)
    return time.monotonic() - start


def test_peer_killed_in_an_exchange_ends_it_with_an_error() -> None:
    survivor, victim = run_processes(2, killed_body)
    assert victim.exit_code == -signal.SIGKILL
    assert survivor.error is None
    assert survivor.value < 5.0


def aborted_body(rank: int, board: Board) -> float:
    transport = join_group(rank, board, 3)
    blocked = threading.Event()

    def abort_when_blocked() -> None:
        blocked.wait(10)
        time.sleep(0.2)  # not needed for the error, only so that the wait is under way
        transport.abort()

    aborter = threading.Thread(target=abort_when_blocked)
    if rank == 0:
        aborter.start()
    blocked.set()
    start = time.monotonic()
    peer = (rank + 1) % 3
    with pytest.raises(TransportError) as caught:
        transport.exchange({}, {peer: torch.empty(8, dtype=torch.uint8)}, 50.0)
    assert not isinstance(caught.value, TransportTimeout)
    spent = time.monotonic() - start
    if rank == 0:
        aborter.join()
        assert "aborted" in str(caught.value)
    return spent


def test_abort_from_another_thread_wakes_this_member_and_its_peers() -> None:
    for outcome in run_processes(3, aborted_body):
        assert outcome.error is None
        assert outcome.value < 2.0


class Options:
    dst_rank = src_rank = 1
    root_rank = 0


def collectives_body(rank: int, board: Board) -> list[Any]:
    transport = join_group(rank, board, 2)
    mine = torch.full((3,), float(rank + 1))
    transport.allreduce([mine])
    gathered = [torch.empty(1), torch.empty(1)]
    transport.allgather([gathered], [torch.tensor([float(rank)])])
    root = torch.tensor([float(rank + 7)])
    transport.broadcast([root], Options())
    options = Options()
    options.dst_rank = options.src_rank = 1 - rank
    there = torch.tensor([float(rank)])
    if rank == 0:
        transport.send([there], options)
    else:
        transport.recv([there], options)
    transport.barrier()
    transport.destroy_group()
    return [float(mine[0]), [float(each) for each in gathered], float(root), float(there)]


def test_collectives_that_users_of_rays_registry_expect() -> None:
    assert [outcome.value for outcome in run_processes(2, collectives_body)] == [[3.0, [0.0, 1.0], 7.0, 0.0]] * 2


def test_misuse_is_told_in_one_line() -> None:
    transport = GlooTransport(2, 1, "group")
    with pytest.raises(TransportError, match="connect"):
        transport.exchange({}, {}, 1.0)
    with pytest.raises(ValueError, match="member 0"):
        transport.rendezvous("127.0.0.1")
    transport.abort()
    transport.destroy_group()


def test_errors_cross_processes() -> None:
    for error in (
        TransportError("g", 1, [2, 3], 1.5, "lost"),
        TransportTimeout("g", 0, [1], 2.0, "silent"),
        CertificateError(["param w[0:3] from rank 0 to rank 1"], 7),
    ):
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert vars(again) == vars(error)


class Communicator:
    is_aborted = False

    def abort(self) -> None:
        self.is_aborted = True


def test_communicator_that_comes_before_or_after_an_abort_is_taken_down() -> None:
    transport, early, late = NcclTransport(2, 0, "group"), Communicator(), Communicator()
    transport._take_in(early)
    assert not early.is_aborted
    transport.abort()
    transport._take_in(late)
    assert early.is_aborted
    assert late.is_aborted


def test_abort_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl, "ABORT_S", 0.1)
    transport, let_go = NcclTransport(2, 0, "group"), threading.Event()

    class Hanging(Communicator):
        def abort(self) -> None:
            let_go.wait(20.0)

    transport._take_in(Hanging())
    monkeypatch.setattr(transport, "_stream", object())
    start = time.monotonic()
    transport.abort()
    transport.destroy_group()
    with pytest.raises(RuntimeError, match="aborted"):
        transport._enqueue(lambda communicator, stream: None)
    assert time.monotonic() - start < 10.0
    let_go.set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_without_a_gpu_the_nccl_backend_says_so() -> None:
    register()
    register()
    assert NcclTransport.why_unavailable() == "this process sees no GPU"
    assert not NcclTransport.check_backend_availability()
