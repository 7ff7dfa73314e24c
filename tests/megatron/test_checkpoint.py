"""Checkpoints: written by us and read by Megatron's own training script, and the other way round, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import BF16, Row, mesh
from megatron.core import dist_checkpointing
from models import trainee
from oracle import parts_by_megatron, whole_by_megatron
from ranks import RanksFailedError, run_ranks
from resize import Generation, differing, hand_over, start_next
from script import load_by_script, save_by_script
from tiny import build, parallel

from ray_etc.actors.small_state import SmallState
from ray_etc.megatron import checkpoint
from ray_etc.planners.parallel import ParallelConfig

PLAIN = {"distributed_optimizer": False}
BUCKETS = {"overlap_grad_reduce": True, "bucket_size": 500}

ROWS = [
    Row("llama", mesh(tp=2, pp=2), mesh(dp=3), BF16),
    Row("llama", mesh(dp=2, **PLAIN), mesh(tp=2), BF16),
    Row("experts", mesh(dp=2, ep=2), mesh(tp=2), BF16),
]


def train_and_save(row: Row, folder: Path) -> dict[str, Any]:
    task = trainee(row.model, row.optimizer, row.batch_size)(row.old)
    for _ in range(2):
        task.train_step()
    task.state.save_checkpoint(folder / "ours", 2)
    save_by_script(task, folder / "theirs", 2)
    return {"parts": parts_by_megatron(task), "small": SmallState.of(task.state).digests(), "next": norms(task)}


def load_each(row: Row, folder: Path) -> list[dict[str, Any]]:
    """Three times: ours by us, ours by the script, and the script's by us."""
    task = trainee(row.model, row.optimizer, row.batch_size)(row.new)
    came = []
    for load in (
        lambda: checkpoint.load(task.state, task.chunks, task.optimizer, folder / "ours"),
        lambda: load_by_script(task, folder / "ours"),
        lambda: checkpoint.load(task.state, task.chunks, task.optimizer, folder / "theirs"),
    ):
        for view in task.state.views():
            view.detach().fill_(float("nan"))
        task.scheduler.num_steps = task.consumed_samples = 0
        answer = load()
        came.append({"answer": answer, "parts": parts_by_megatron(task)})
        came[-1]["small"] = SmallState.of(task.state).digests()
    came[-1]["next"] = norms(task)
    return came


def norms(task: Any) -> list[float]:
    """Of the gradients of the next two steps, which depend on every weight and on the first update's moments."""
    return [task.train_step()["grad_norm"] for _ in range(2)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_either_reads_what_the_other_wrote(row: Row, tmp_path: Path) -> None:
    before = run_ranks(train_and_save, row.old.world_size, row, tmp_path)
    after = run_ranks(load_each, row.new.world_size, row, tmp_path)
    whole = whole_by_megatron(rank["parts"] for rank in before)
    for number, answer in enumerate((2, (2, 2 * row.batch_size), 2)):
        assert {rank[number]["answer"] for rank in after} == {answer}
        assert differing(whole, whole_by_megatron(rank[number]["parts"] for rank in after)) == []
    for number in (0, 2):
        assert [rank[number]["small"] for rank in after] == [before[0]["small"]] * len(after)
    assert after[0][2]["next"] == pytest.approx(before[0]["next"], rel=2e-2)


def run_on(config: ParallelConfig, folder: Path) -> list[float]:
    task = build(config, dropout=0.1, bf16=True)
    for _ in range(2):
        task.train_step()
    task.save_checkpoint(folder)
    return [task.train_step()["loss"] for _ in range(2)]


def start_from(config: ParallelConfig, folder: Path) -> tuple[int, list[float]]:
    task = build(config, seed=8, dropout=0.1, bf16=True, checkpoint=folder)
    return task.state.next_step, [task.train_step()["loss"] for _ in range(2)]
