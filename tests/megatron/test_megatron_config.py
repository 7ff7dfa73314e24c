"""A user's mistake is one line, with the numbers and the remedy."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from tiny import MODEL, parallel

from ray_etc.actors.errors import BatchNotShared
from ray_etc.megatron import BatchConfig, GPTConfig, OptimizerSettings, check_parallel
from ray_etc.planners.parallel import ParallelConfig

BATCH = BatchConfig(global_batch_size=8, micro_batch_size=2)


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (
            {"num_attention_heads": 6, "num_query_groups": 6, "hidden_size": 48},
            parallel(tp=4),
            "num_attention_heads=6 cannot be split by tensor_parallel=4; use 1, 2, 3 or 6",
        ),
        (
            {"num_attention_heads": 12, "num_query_groups": 4, "hidden_size": 48, "ffn_hidden_size": 48},
            parallel(tp=6),
            "num_query_groups=4 and tensor_parallel=6: one must divide the other; use 1, 2, 4 or 12",
        ),
        (
            {"num_query_groups": 1, "hidden_size": 8, "ffn_hidden_size": 24, "num_attention_heads": 4},
            parallel(tp=4),
            None,
        ),
        (
            {"ffn_hidden_size": 45},
            parallel(tp=2),
            "ffn_hidden_size=45 cannot be split by tensor_parallel=2; use 1, 3, 5, 9, 15 or 45",
        ),
        ({}, parallel(pp=3), "num_layers=4 cannot be split by pipeline_parallel=3; use 1, 2 or 4"),
        (
            {},
            parallel(dp=3),
            "global_batch_size=8 is 4 batches of micro_batch_size=2, which data_parallel=3 cannot share equally; "
            "use data_parallel=1, 2 or 4, or a global batch that is a multiple of 6",
        ),
        (
            {"sequence_length": 15},
            parallel(tp=2, sp=True),
            "sequence_length=15 cannot be split by tensor_parallel=2; use 1, 3, 5 or 15",
        ),
        (
            {},
            ParallelConfig(fully_sharded=True),
            "fully_sharded=True can be planned (`python -m ray_etc plan`), but not trained under yet; leave it out",
        ),
        (
            {"sequence_length": 18},
            ParallelConfig(context_parallel=2),
            "sequence_length=18 cannot be split by 2 x context_parallel=2 = 4; use context_parallel=1, 3 or 9",
        ),
        (
            {"sequence_length": 12},
            ParallelConfig(4, context_parallel=2, sequence_parallel=True),
            "sequence_length / context_parallel=6 cannot be split by tensor_parallel=4; use 1, 2, 3 or 6",
        ),
        (
            {},
            ParallelConfig(data_parallel=2, expert_parallel=2),
            "expert_parallel=2, expert_tensor_parallel=1, but the model has no experts; give it num_moe_experts, or "
            "leave them out",
        ),
        (
            {"num_moe_experts": 6},
            ParallelConfig(data_parallel=4, expert_parallel=4),
            "num_moe_experts=6 cannot be split by expert_parallel=4; use 1, 2, 3 or 6",
        ),
        (
            {"num_moe_experts": 4, "moe_ffn_hidden_size": 9},
            ParallelConfig(2, sequence_parallel=True),
            "moe_ffn_hidden_size=9 cannot be split by expert_tensor_parallel=2; use 1, 3 or 9",
        ),
        (
            {"num_moe_experts": 4},
            ParallelConfig(2),
            "num_moe_experts=4 with tensor_parallel=2: Megatron trains experts under tensor parallelism with "
            "sequence_parallel=True only; set it",
        ),
        (
            {},
            ParallelConfig(1, 3, virtual_pipeline=2),
            "num_layers=4 cannot be split by pipeline_parallel x virtual_pipeline=6; use 1, 2 or 4",
        ),
        (
            {},
            ParallelConfig(1, 2, pipeline_layers=(1, 2)),
            "pipeline_layers=(1, 2) are 3 layers; the model has 4",
        ),
        (
            {},
            ParallelConfig(1, 3, pipeline_layers=(2, 0, 2)),
            "pipeline_layers=(2, 0, 2) leaves nothing to stage 1; give each stage between the first and the last a "
            "layer",
        ),
        (
            {},
            ParallelConfig(1, 2, 4, virtual_pipeline=2),
            "1 micro-batches a replica cannot be interleaved over pipeline_parallel=2 stages of virtual_pipeline=2 "
            "chunks; use a multiple of 2 micro-batches",
        ),
        ({}, ParallelConfig(1, 3, pipeline_layers=(1, 2, 1)), None),
        ({}, parallel(tp=4, pp=4, dp=4, sp=True), None),
    ],
)
def test_check_parallel(change: dict[str, Any], config: ParallelConfig, message: str | None) -> None:
    model = GPTConfig(**{**MODEL, **change})
    if message is None:
        check_parallel(model, BATCH, config)
        return
    with pytest.raises(ValueError) as error:  # noqa: PT011  the whole message is compared
        check_parallel(model, BATCH, config)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("config", "replicas"),
    [(parallel(dp=3), (1, 2, 4)), (ParallelConfig(1, 2, 4, virtual_pipeline=2), (1, 2))],
    ids=str,
)
def test_a_batch_that_replicas_cannot_share_says_which_can(config: ParallelConfig, replicas: tuple[int, ...]) -> None:
    """Also after the refusal came from another process."""
    with pytest.raises(BatchNotShared) as refused:
        check_parallel(GPTConfig(**MODEL), BATCH, config)
    received = pickle.loads(pickle.dumps(refused.value))
    assert (str(received), received.replicas) == (str(refused.value), replicas)
    for number in replicas:
        check_parallel(GPTConfig(**MODEL), BATCH, replace(config, data_parallel=number))


def test_configurations_from_mappings() -> None:
    assert GPTConfig.of({"num_layers": 2}) == GPTConfig(num_layers=2)
    assert GPTConfig.of(GPTConfig(num_layers=2)) == GPTConfig(num_layers=2)
    assert OptimizerSettings.of(None) == OptimizerSettings()
    with pytest.raises(ValueError, match=r"^GPTConfig has no layers; it has num_layers, hidden_size, "):
        GPTConfig.of({"layers": 2})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: GPTConfig(hidden_size=30, num_attention_heads=4),
            "hidden_size=30 must be a multiple of num_attention_heads=4",
        ),
        (lambda: GPTConfig(num_query_groups=3), "num_attention_heads=8 must be a multiple of num_query_groups=3"),
        (lambda: GPTConfig(hidden_size=24), "hidden_size=24 over num_attention_heads=8 makes heads of 3; "),
        (
            lambda: BatchConfig(global_batch_size=8, micro_batch_size=3),
            "global_batch_size=8 must be a multiple of micro_batch_size=3",
        ),
        (lambda: OptimizerSettings(lr=1e-6), "min_lr=1e-05 is above lr=1e-06"),
        (lambda: OptimizerSettings(warmup_steps=5, decay_steps=5), "decay_steps=5 must be more than warmup_steps=5"),
    ],
)
def test_impossible_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        make()
    assert str(error.value).startswith(message)
