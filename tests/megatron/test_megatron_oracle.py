"""The catalogue agrees with Megatron's own checkpoint about which element is which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from logical import RankShards, differing, read, whole
from oracle import load_with_megatron, save_with_megatron
from ranks import run_ranks
from tiny import ONE, build, parallel

from ray_etc.planners.parallel import ParallelConfig


def train_and_save(config: ParallelConfig, folder: Path, **model: Any) -> tuple[RankShards, list[float]]:
    task = build(config, **model)
    for _ in range(2):
        task.train_step()
    before = read(task.state)
    save_with_megatron(task, folder)
    return before, [task.train_step()["loss"] for _ in range(2)]


def load_and_train(config: ParallelConfig, folder: Path, **model: Any) -> tuple[RankShards, list[float]]:
    task = build(config, **model)
    load_with_megatron(task, folder)
    return read(task.state), [task.train_step()["loss"] for _ in range(2)]


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("old", "new", "bf16"),
    [
        (parallel(tp=4, sp=True), parallel(pp=2, dp=2), True),
        (parallel(pp=2, zero=False), parallel(tp=2, zero=False), False),
        (parallel(dp=2), parallel(pp=2, zero=False), True),
        slow(parallel(tp=2), parallel(dp=2), False),
        slow(parallel(tp=2), parallel(dp=2), True),
        slow(parallel(dp=2), parallel(tp=4), True),
        slow(parallel(tp=2, dp=2, zero=False), parallel(pp=4, zero=False), True),
        slow(parallel(dp=2), parallel(pp=2, zero=False), False),
        slow(parallel(tp=2, zero=False), ONE, True),
        slow(parallel(tp=2, zero=False), parallel(dp=2), False),
    ],
    ids=lambda value: str(value) if isinstance(value, ParallelConfig) else ("fp32", "bf16")[value],
)
def test_catalogue_and_checkpoint_agree(old: ParallelConfig, new: ParallelConfig, bf16: bool, tmp_path: Path) -> None:
    before = run_ranks(train_and_save, old.world_size, old, tmp_path, bf16=bf16)
    after = run_ranks(load_and_train, new.world_size, new, tmp_path, bf16=bf16)
    assert differing(whole([shards for shards, _ in before]), whole([shards for shards, _ in after])) == []
    assert after[0][1] == pytest.approx(before[0][1], abs=5e-3 if bf16 else 1e-5)
