"""State travels from process to process: Ray's object store carries metadata only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray._private.internal_api import get_memory_info_reply, get_state_from_address
from ray.cluster_utils import Cluster
from runs import check_exact, finish, start, wait_for_step

from ray_etc import ParallelConfig

pytestmark = pytest.mark.ray

MIB = 2**20
SIZE = 3_000_000  # 24 MB of weights and momentum, far above what metadata could hide


def created_nbytes(cluster: Cluster) -> int:
    """All bytes that were ever put into the object stores of the living nodes."""
    return get_memory_info_reply(get_state_from_address(cluster.address)).store_stats.cumulative_created_bytes


def test_no_object_of_1_mib_is_put_in_a_handover(cluster: Cluster, nodes: Any, tmp_path: Path) -> None:
    nodes.add(2)
    run = start(tmp_path, (1, 2), size=SIZE)
    wait_for_step(run)
    before = created_nbytes(cluster)
    record = run.resize(parallel=ParallelConfig(data_parallel=2, distributed_optimizer=False))
    put = created_nbytes(cluster) - before
    wait_for_step(run)
    check_exact(finish(run, tmp_path))
    assert record.nbytes_local + record.nbytes_wire == 2 * 2 * SIZE * 4
    assert put < MIB


def test_the_count_sees_what_is_put(cluster: Cluster, nodes: Any) -> None:
    import ray

    nodes.add(1)
    before = created_nbytes(cluster)
    ref = ray.put(bytes(2 * MIB))
    assert created_nbytes(cluster) - before >= 2 * MIB
    del ref
