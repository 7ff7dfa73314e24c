"""However a layer keeps its experts, they are the tensors that the planner expects."""

from __future__ import annotations

import pytest
from logical import RankShards, read, whole
from matrix import BF16, mesh
from models import BASE, EXPERTS
from ranks import run_ranks
from trainee import trainee

from ray_etc.planners.model import ExpertShape, ModelShape
from ray_etc.planners.parallel import ParallelConfig


def held(parallel: ParallelConfig, model: str) -> RankShards:
    return read(trainee(model, BF16, 8)(parallel).state)


@pytest.mark.parametrize("parallel", [mesh(), mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1)], ids=str)
@pytest.mark.parametrize("model", ["experts, biased router", "experts, grouped by a stand-in of Transformer Engine's"])
def test_experts_of_a_layer_are_one_tensor_by_expert(model: str, parallel: ParallelConfig) -> None:
    ranks = run_ranks(held, parallel.world_size, parallel, model)
    whole(ranks)  # fails where an element is held by no rank, or not alike
    specs = {spec.key: spec for rank in ranks for spec, _, _ in rank}
    experts = ExpertShape(EXPERTS["num_moe_experts"], EXPERTS["moe_ffn_hidden_size"], router_bias="biased" in model)
    shape = ModelShape(BASE["num_layers"], BASE["hidden_size"], BASE["ffn_hidden_size"], 4, 2, 29, experts=experts)
    expected = {spec.key: spec for spec in shape.tensors() if ".experts." in spec.name or ".router." in spec.name}
    hints = {key: (spec.shape, spec.dtype, spec.layer, spec.expert_dim) for key, spec in expected.items()}
    found = {key: (spec.shape, spec.dtype, spec.layer, spec.expert_dim) for key, spec in specs.items()}
    assert {key: found.get(key) for key in hints} == hints
