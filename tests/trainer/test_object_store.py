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


def test_requested_dp3_to_dp1_to_dp2_puts_no_object_of_1_mib(cluster: Cluster, nodes: Any, tmp_path: Path) -> None:
    nodes.add(3)
    plain = ParallelConfig(distributed_optimizer=False)
    run = start(tmp_path, (1, 3), parallel=plain, checkpoint_at=1, size=SIZE, step_s=0.2)  # a step is work
    wait_for_step(run)
    before = created_nbytes(cluster)
    one = run.resize(1)
    assert run.status().slots_usable <= 3
    wait_for_step(run)
    two = run.resize(parallel=ParallelConfig(data_parallel=2))
    put = created_nbytes(cluster) - before
    wait_for_step(run)
    result = finish(run, tmp_path)
    check_exact(result)
    assert [(r.parallel_from.data_parallel, r.parallel_to.data_parallel) for r in result.resizes] == [(3, 1), (1, 2)]
    assert one.certified
    assert two.certified
    assert two.parallel_to.distributed_optimizer
    assert one.nbytes_local + one.nbytes_wire == SIZE * 8
    assert put < MIB
    assert result.checkpoint is not None
    assert result.checkpoint.path.endswith("checkpoint1")


def test_the_count_sees_what_is_put(cluster: Cluster, nodes: Any) -> None:
    import ray

    nodes.add(1)
    before = created_nbytes(cluster)
    ref = ray.put(bytes(2 * MIB))
    assert created_nbytes(cluster) - before >= 2 * MIB
    del ref
