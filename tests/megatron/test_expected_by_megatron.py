"""What the planner expects of Megatron, against Megatron's own arithmetic, without a process group."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.parallel_state import RankGenerator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from ray_etc.planners.expected import expected_table
from ray_etc.planners.layout import TensorSpec
from ray_etc.planners.model import ModelShape
from ray_etc.planners.parallel import ParallelConfig

MESHES = [
    ParallelConfig(2, 2, 2, context_parallel=3),
    ParallelConfig(2, 3, 4, expert_parallel=4),
    ParallelConfig(4, 2, 2, context_parallel=2, expert_parallel=2, expert_tensor_parallel=2),
    ParallelConfig(1, 2, 8, expert_parallel=2, expert_tensor_parallel=4),
]


@pytest.mark.parametrize("parallel", MESHES, ids=str)
def test_ranks_that_hold_the_same_are_megatrons_data_parallel_groups(parallel: ParallelConfig) -> None:
    """Dense weights are alike over dp and cp, experts over expert-dp; ZeRO-1 ranges go in the order of the group."""
    order = "tp-cp-ep-dp-pp"
    tp, pp, cp = parallel.tensor_parallel, parallel.pipeline_parallel, parallel.context_parallel
    etp, ep = parallel.tensor_parallel_of_experts, parallel.expert_parallel
    dense = RankGenerator(tp, 1, parallel.data_parallel, pp, cp, order)
    experts = RankGenerator(etp, ep, parallel.expert_replicas, pp, 1, order)
    rows, layers = 16 * 27, pp
    for expert_dim, groups in ((None, dense.get_ranks("dp-cp")), (0, experts.get_ranks("dp"))):
        shape, split_dim = ((rows,), 0) if expert_dim is None else ((16, rows), 1)
        tensors = [
            TensorSpec(kind, f"{kind}{layer}", shape, "float32", 4, split_dim, layer, expert_dim)
            for kind in ("param", "exp_avg")
            for layer in range(layers + 1)
        ]
        table = expected_table(tensors, parallel)
        kind_of_family = [family[0].kind for family in table.families]
        held: dict[str, dict[int, list[tuple[int, tuple[int, ...], tuple[int, ...]]]]] = {"param": {}, "exp_avg": {}}
        for family, rank, offsets, lengths in zip(table.family, table.rank, table.offsets, table.lengths, strict=True):
            box = (int(family), tuple(offsets.tolist()), tuple(lengths.tolist()))
            held[kind_of_family[family]].setdefault(int(rank), []).append(box)
        alike: dict[tuple[object, ...], list[int]] = {}
        for rank, boxes in sorted(held["param"].items()):
            alike.setdefault(tuple(boxes), []).append(rank)
        assert sorted(alike.values()) == sorted(groups)
        if expert_dim is None:
            # The first of a group has the beginning of the buffer, which is the last weight, and so on.
            starts = {rank: min((-family, box) for family, box, _ in boxes) for rank, boxes in held["exp_avg"].items()}
            assert all(starts[a] < starts[b] for group in groups for a, b in pairwise(group))


@pytest.mark.parametrize(("layers", "pp", "vpp"), [(126, 16, 1), (126, 16, 2), (30, 4, 2), (31, 8, 1), (12, 4, 1)])
def test_stages_are_megatrons_with_embedding_and_loss_in_the_split(layers: int, pp: int, vpp: int) -> None:
    parallel = ModelShape(layers, 8, 8, 8, 8, 8).settled(ParallelConfig(1, pp, virtual_pipeline=vpp))
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=8,
        num_attention_heads=8,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp if vpp > 1 else None,
        pipeline_dtype=torch.float32,
        account_for_loss_in_pipeline_split=layers % (pp * vpp) != 0,
        account_for_embedding_in_pipeline_split=(layers + 2) % (pp * vpp) == 0,
    )
    first = 0
    for number, count in enumerate(parallel.layers_of_virtual_stages(layers)):
        chunk, stage = divmod(number, pp)
        at = chunk if vpp > 1 else None
        assert get_num_layers_to_build(config, at, stage) == count
        assert get_transformer_layer_offset(config, at, stage) == first
        first += count


@pytest.mark.parametrize("has_mesh", [False, True])
def test_buffers_are_megatrons(has_mesh: bool) -> None:
    """Sizes are multiples of 128 x 4 replicas, so that Megatron pads nothing."""
    shapes = {"a": (16, 128), "router": (4, 512), "fc1": (4, 2, 8, 64), "fc2": (4, 64, 8), "last": (8, 256)}
    replicas, expert_replicas, local_experts = 4, 2 if has_mesh else 4, 2 if has_mesh else 4
    parameters: dict[torch.nn.Parameter, tuple[str, int]] = {}
    for name, shape in shapes.items():
        is_expert = name.startswith("fc")
        for number in range(local_experts if is_expert else 1):
            parameter = torch.nn.Parameter(torch.empty(shape[1:] if is_expert else shape))
            parameter.allreduce = not (is_expert and has_mesh)  # type: ignore[attr-defined]
            parameters[parameter] = (name, number)
    layout = DistributedOptimizer.compute_full_param_layout(
        list(parameters), None, replicas, DistributedDataParallelConfig(), expert_replicas
    )
    by_megatron: dict[tuple[int, str], set[int]] = {}
    for buffer in layout.layouts.values():
        size = expert_replicas if next(iter(buffer.param_index_map)).allreduce is False else replicas
        ((_, end),) = buffer.bucket_indices
        for parameter, (start, stop, _) in buffer.param_index_map.items():
            name, number = parameters[parameter]
            for index in range(size):
                low, high = max(start, index * end // size), min(stop, (index + 1) * end // size)
                first = number * parameter.numel() - start
                by_megatron.setdefault((index, name), set()).update(range(low + first, high + first))
    parallel = ParallelConfig(1, 1, replicas, expert_parallel=2 if has_mesh else 1)
    tensors = []
    for name, shape in shapes.items():
        names = {"fc1": ("fc1_v", "fc1_w")}.get(name, (name,))
        for half in names:
            cut = (shape[0], *shape[2:]) if len(names) == 2 else shape
            expert_dim = 0 if name.startswith("fc") else None
            tensors.append(TensorSpec("exp_avg", half, cut, "float32", 4, None, 0, expert_dim))
    table = expected_table(tensors, parallel)
    by_planner: dict[tuple[int, str], set[int]] = {}
    for family, rank, offsets, lengths in zip(table.family, table.rank, table.offsets, table.lengths, strict=True):
        ((tensor,), local) = table.families[family], int(rank)
        if has_mesh and tensor.expert_dim is not None:
            if rank % 2:
                continue  # the other half of the experts, laid out alike
            local //= 2
        name = tensor.name.split("_")[0]
        array = torch.arange(torch.Size(shapes[name]).numel()).view(shapes[name])
        if name == "fc1":
            array = array[:, 1 if tensor.name.endswith("v") else 0]
        box = tuple(slice(o, o + n) for o, n in zip(offsets.tolist(), lengths.tolist(), strict=True))
        array = array.reshape(*array.shape, *[1] * (len(box) - array.ndim))
        by_planner.setdefault((local, name), set()).update(array[box].flatten().tolist())
    assert by_planner == {key: held for key, held in by_megatron.items() if held}
