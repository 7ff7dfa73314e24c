"""The transports as Ray's collective registry knows them, in real actors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
import torch

from ray_etc.actors.errors import TransportError, TransportTimeout
from ray_etc.actors.transports import close_group, get_group, open_group

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray")]


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init("local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
    yield
    ray.shutdown()


@ray.remote(num_cpus=0.5, max_restarts=0)
class Member:
    @ray.method
    def open(self, rank: int, world_size: int, backend: str = "ETC_GLOO") -> bytes | None:
        transport = open_group(backend, "group", rank, world_size)
        return transport.rendezvous() if rank == 0 else None

    @ray.method
    def connect(self, rendezvous: bytes, timeout_s: float = 20.0) -> None:
        get_group("group").connect(rendezvous, timeout_s)

    @ray.method
    def swap(self, nbytes: int, timeout_s: float = 20.0) -> list[int]:
        """The first byte of each message from the peers, which is their rank."""
        transport = get_group("group")
        sends = {peer: torch.full((nbytes,), transport.rank, dtype=torch.uint8) for peer in transport.peers}
        receives = {peer: torch.empty(nbytes, dtype=torch.uint8) for peer in transport.peers}
        transport.exchange(sends, receives, timeout_s)
        return [int(receives[peer][-1]) for peer in transport.peers]

    @ray.method
    def allreduce(self) -> float:
        from ray.util import collective

        ours = torch.ones(4)
        collective.allreduce(ours, "group")
        collective.barrier("group")
        return float(ours[0])

    @ray.method
    def close(self) -> None:
        close_group("group")
        close_group("group")


@pytest.fixture
def members() -> Iterator[list[Any]]:
    actors = [Member.remote() for _ in range(2)]  # type: ignore[attr-defined]
    yield actors
    for actor in actors:
        ray.kill(actor)


def connect(members: list[Any]) -> None:
    opened = ray.get([member.open.remote(rank, len(members)) for rank, member in enumerate(members)])
    ray.get([member.connect.remote(opened[0]) for member in members])


def test_exchange_and_rays_own_calls_and_a_second_group_of_the_same_name(members: list[Any]) -> None:
    for _ in range(2):
        connect(members)
        assert ray.get([member.swap.remote(1 << 16) for member in members]) == [[1], [0]]
        assert ray.get([member.allreduce.remote() for member in members]) == [2.0, 2.0]
        ray.get([member.close.remote() for member in members])


def test_killed_actor_ends_the_exchange_of_its_peer(members: list[Any]) -> None:
    connect(members)
    waiting = members[0].swap.remote(1 << 16, timeout_s=60.0)
    ray.kill(members[1])
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        ray.get(waiting, timeout=20)
    assert caught.value.peers == (1,)
    assert time.monotonic() - start < 5.0


def test_silent_actor_ends_the_exchange_at_its_deadline(members: list[Any]) -> None:
    connect(members)
    with pytest.raises(TransportTimeout):
        ray.get(members[0].swap.remote(8, timeout_s=0.5), timeout=20)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_nccl_without_a_gpu_is_refused_in_one_line(members: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=r"ETC_NCCL cannot be used on .*: this process sees no GPU"):
        ray.get(members[0].open.remote(0, 2, "ETC_NCCL"))
