"""Collective groups of our own in Ray's registry: ETC_GLOO for host memory, ETC_NCCL for GPUs."""

from __future__ import annotations

import platform
from typing import cast

from ray.util import collective

from ray_etc.actors.ray_internals import register_backend
from ray_etc.actors.transports.base import Transport
from ray_etc.actors.transports.gloo import GlooTransport
from ray_etc.actors.transports.nccl import NcclTransport

__all__ = ["GlooTransport", "NcclTransport", "Transport", "close_group", "get_group", "open_group", "register"]


TRANSPORTS: dict[str, type[Transport]] = {each.backend(): each for each in (GlooTransport, NcclTransport)}


def register() -> None:
    """Make the backends known to `ray.util.collective` in this process; any number of times."""
    for name, transport in TRANSPORTS.items():
        register_backend(name, transport)


def open_group(backend: str, group_name: str, rank: int, world_size: int) -> Transport:
    """Enter this actor as member `rank` of a new group. It carries nothing until it is connected."""
    register()
    if why := TRANSPORTS[backend].why_unavailable():
        raise RuntimeError(f"{backend} cannot be used on {platform.node()}: {why}")
    collective.init_collective_group(world_size, rank, backend, group_name)
    return get_group(group_name)


def get_group(group_name: str) -> Transport:
    """The group that this actor opened."""
    return cast(Transport, collective.get_group_handle(group_name))


def close_group(group_name: str) -> None:
    """Leave a group, breaking what it still carries. A group that is not there is no error."""
    if collective.is_group_initialized(group_name):
        collective.destroy_collective_group(group_name)
