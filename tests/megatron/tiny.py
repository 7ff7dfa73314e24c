"""The smallest model that has every difficulty, and its ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray_etc.megatron
from ray_etc.megatron import Task
from ray_etc.planners.parallel import ParallelConfig

# An odd vocabulary, fewer groups than a tensor-parallel group of four, and sizes without common factors.
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 44,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 257,
    "sequence_length": 16,
}

MICRO_BATCH_SIZE = 2

DATA = Path(argparse.__file__)
"""Text enough for every test, and opened and shuffled at once: the whole standard library takes longer than a step."""

ONE = ParallelConfig()


def parallel(tp: int = 1, pp: int = 1, dp: int = 1, *, sp: bool = False, zero: bool = True) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, sequence_parallel=sp, distributed_optimizer=zero)


def build(
    config: ParallelConfig,
    *,
    seed: int = 7,
    data: Path = DATA,
    global_batch_size: int | dict[int, int] = 8,
    clip_grad: float = 1.0,
    checkpoint: Any = None,
    **model: Any,
) -> Task:
    return ray_etc.megatron.build(
        {**MODEL, **model},
        config,
        optimizer={"lr": 1e-2, "warmup_steps": 2, "decay_steps": 20, "clip_grad": clip_grad},
        data=data,
        global_batch_size=global_batch_size,
        micro_batch_size=MICRO_BATCH_SIZE,
        seed=seed,
        checkpoint=checkpoint,
    )
