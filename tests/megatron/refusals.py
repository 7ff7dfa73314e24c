"""What cannot be moved, and is refused with its reason before anything starts. Each is tried by test_refusals.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from matrix import BF16, MUON, ONE, PLAIN, PRECISE, mesh

from ray_etc.planners.parallel import ParallelConfig


@dataclass(frozen=True)
class Refusal:
    """`model` under `parallel` with these arguments is refused by `by` with a message that has `says` in it."""

    what: str
    says: str
    by: str = "ray_etc"
    model: str = "llama"
    parallel: ParallelConfig = ONE
    optimizer: dict[str, Any] = field(default_factory=dict)
    change: dict[str, Any] = field(default_factory=dict)


REFUSALS = [
    Refusal(
        "optimizer state in host memory (`optimizer_cpu_offload`)",
        "keeps main weights and moments in host memory",
        optimizer={"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0, **BF16},
    ),
    Refusal(
        "precision-aware optimizer without Transformer Engine",
        "requires FusedAdam from TransformerEngine",
        by="Megatron",
        optimizer={"use_precision_aware_optimizer": True, **BF16},
    ),
    Refusal(
        "moments in 8 bits or fp16",
        "exp_avg_dtype=torch.uint8 is kept as multiples of a scale",
        optimizer={**PRECISE, "exp_avg_dtype": torch.uint8},
    ),
    Refusal(
        "weights in 8 or 4 bits",
        "scales and amax histories of Transformer Engine cannot be moved",
        optimizer=BF16,
        change={"fp8": "hybrid"},
    ),
    Refusal(
        "Muon whose weights are dealt out to the replicas (`use_layer_wise_distributed_optimizer`)",
        "set use_layer_wise_distributed_optimizer=False",
        parallel=mesh(dp=2, **PLAIN),
        optimizer={**MUON, "use_layer_wise_distributed_optimizer": True, **BF16},
    ),
    Refusal(
        "Muon with a second moment",
        "cannot find the state of a TensorParallelAdaptiveMuon",
        parallel=mesh(**PLAIN),
        optimizer={"optimizer": "adaptive_muon", **BF16},
    ),
    Refusal("Muon with ZeRO-1", "replicas would drift apart", parallel=mesh(dp=2), optimizer=MUON),
    Refusal("SGD with ZeRO-1", "Only Adam, HybridDeviceOptimizer", by="Megatron", optimizer={"optimizer": "sgd"}),
    Refusal(
        "experts under tensor parallelism without sequence parallelism",
        "without also enabling sequence parallelism",
        by="Megatron",
        model="experts",
        parallel=mesh(tp=2, sequence_parallel=False),
    ),
    Refusal(
        "a stage without layers between the first and the last",
        "its pipeline stage has no layers",
        parallel=mesh(pp=3, pipeline_layers=(1, 0, 1)),
    ),
    Refusal(
        "a tied embedding with several heads of prediction over several stages",
        "output_layer_weight_key not in sharded_state_dict",
        by="Megatron",
        model="two heads, tied",
        parallel=mesh(pp=2),
    ),
]
