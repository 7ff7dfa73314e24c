"""The catalogue names every element of the state, once a replica, in the memory that training uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from logical import RankShards, read, whole
from ranks import run_ranks
from tiny import MODEL, ONE, build, parallel

from ray_etc.megatron import compat
from ray_etc.planners.parallel import ParallelConfig

CONFIGURATIONS = [
    parallel(),
    parallel(tp=2, zero=False),
    parallel(tp=4, sp=True),
    parallel(pp=2, dp=2),
    parallel(tp=2, dp=2),
    parallel(tp=2, pp=2, zero=False),
    parallel(dp=3),
]


def true_shapes(**change: Any) -> dict[str, tuple[int, ...]]:
    """The weights of the tiny model as one device would hold them, worked out by hand."""
    model = {**MODEL, **change}
    hidden, ffn, vocab = model["hidden_size"], model["ffn_hidden_size"], model["vocab_size"]
    head = hidden // model["num_attention_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (vocab, hidden),
        "decoder.final_layernorm.weight": (hidden,),
        "output_layer.weight": (vocab, hidden),
    }
    for layer in range(model["num_layers"]):
        name = f"decoder.layers.{layer}"
        shapes |= {
            f"{name}.self_attention.linear_qkv.layer_norm_weight": (hidden,),
            f"{name}.self_attention.linear_qkv.weight": (hidden + 2 * model["num_query_groups"] * head, hidden),
            f"{name}.self_attention.linear_proj.weight": (hidden, hidden),
            f"{name}.mlp.linear_fc1.layer_norm_weight": (hidden,),
            f"{name}.mlp.linear_fc1.weight_w": (ffn, hidden),
            f"{name}.mlp.linear_fc1.weight_v": (ffn, hidden),
            f"{name}.mlp.linear_fc2.weight": (hidden, ffn),
        }
    return shapes


def catalogue(config: ParallelConfig, steps: int = 1, **change: Any) -> RankShards:
    task = build(config, **change)
    for _ in range(steps):
        task.train_step()
    return read(task.state)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", CONFIGURATIONS, ids=str)
def test_every_element_of_every_kind(config: ParallelConfig, bf16: bool) -> None:
    ranks = run_ranks(catalogue, config.world_size, config, bf16=bf16, global_batch_size=2 * 3 * 2)
    tensors = whole(ranks)
    kinds = {"param", "exp_avg", "exp_avg_sq"} | ({"main_param"} if bf16 else set())
    assert {kind for kind, _ in tensors} == kinds
    for kind in kinds:
        assert {name: tuple(t.shape) for (k, name), t in tensors.items() if k == kind} == true_shapes()
        dtypes = {t.dtype for (k, _), t in tensors.items() if k == kind}
        assert dtypes == {torch.bfloat16 if bf16 and kind == "param" else torch.float32}
    assert all(t.abs().sum() > 0 for t in tensors.values()), "some tensor is all zeros after a step"


def test_moments_are_there_before_the_first_step() -> None:
    tensors = whole(run_ranks(catalogue, 2, parallel(dp=2), steps=0, bf16=True))
    assert {name for kind, name in tensors if kind == "exp_avg_sq"} == set(true_shapes())
    assert not any(t.abs().sum() for (kind, _), t in tensors.items() if kind in ("exp_avg", "exp_avg_sq"))


def test_zero_holds_each_moment_once() -> None:
    ranks = run_ranks(catalogue, 4, parallel(tp=2, dp=2), bf16=True)
    for kind, copies in (("param", 2), ("main_param", 1), ("exp_avg", 1)):
        held = sum(
            box.numel for rank in ranks for spec, box, _ in rank if spec.kind == kind and spec.split_dim is not None
        )
        split = [shape for name, shape in true_shapes().items() if "norm" not in name]
        assert held == copies * sum(torch.Size(shape).numel() for shape in split)


@pytest.mark.parametrize("zero", [True, False], ids=["zero", "plain"])
def test_a_rank_with_nothing_but_padding(zero: bool, tmp_path: Path) -> None:
    """Five words over four ranks: two rows each, of which the third rank has one real and the last none."""
    data = tmp_path / "text"
    data.write_bytes(bytes(range(5)) * 100)
    ranks = run_ranks(catalogue, 4, parallel(tp=4, zero=zero), vocab_size=5, data=data)
    rows = [
        sum(box.lengths[0] for spec, box, _ in rank if spec.key == ("param", "output_layer.weight")) for rank in ranks
    ]
    assert rows == [2, 2, 1, 0]
    tensors = whole(ranks)
    assert {name: tuple(t.shape) for (kind, name), t in tensors.items() if kind == "exp_avg"} == true_shapes(
        vocab_size=5
    )


def test_hints_say_where_a_tensor_would_be_cut() -> None:
    (rank,) = run_ranks(catalogue, 1, ONE, steps=0)
    hints = {spec.name: (spec.split_dim, spec.layer) for spec, _, _ in rank}
    assert hints["embedding.word_embeddings.weight"] == (0, -1)
    assert hints["decoder.layers.2.self_attention.linear_qkv.weight"] == (0, 2)
    assert hints["decoder.layers.3.mlp.linear_fc1.weight_v"] == (0, 3)
    assert hints["decoder.layers.3.mlp.linear_fc2.weight"] == (1, 3)
    assert hints["decoder.layers.3.mlp.linear_fc1.layer_norm_weight"] == (None, 3)
    assert hints["decoder.final_layernorm.weight"] == (None, 4)
    assert hints["output_layer.weight"] == (0, 4)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("zero", [True, False], ids=["zero", "plain"])
def test_views_are_the_memory_that_training_uses(zero: bool, bf16: bool) -> None:
    def write_and_look() -> dict[str, set[float]]:
        task = build(parallel(dp=2, zero=zero), bf16=bf16, vocab_size=256)  # no padding, so that all of it is written
        values = {"param": 3.0, "exp_avg": 5.0, "exp_avg_sq": 7.0, "main_param": 11.0}
        for shard in task.state.shards:
            shard.view.fill_(values[shard.tensor.kind])
        seen: dict[str, set[float]] = {kind: set() for kind in values}
        for param in task.chunks[0].parameters():
            seen["param"].update(param.detach().float().unique().tolist())
        for leaf in compat.leaf_optimizers(task.optimizer):
            for group in leaf.optimizer.param_groups:
                for main in group["params"]:
                    seen["main_param"].update(main.detach().unique().tolist())
                    for kind in ("exp_avg", "exp_avg_sq"):
                        seen[kind].update(leaf.optimizer.state[main][kind].unique().tolist())
        return seen

    for seen in run_ranks(write_and_look, 2):
        assert seen == {"param": {3.0}, "exp_avg": {5.0}, "exp_avg_sq": {7.0}, "main_param": {11.0 if bf16 else 3.0}}
