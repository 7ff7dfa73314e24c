"""The training state as a Megatron distributed checkpoint, written and read under any configuration.

Model, optimizer, scheduler, iteration, samples consumed and random streams have the names and places that Megatron's
own script gives them, so that it resumes from the folder. What it has no place for goes beside them: all of the
replicated state, as it is handed over in a resize, and the random streams of every rank, where Megatron keeps only
those of one replica. A checkpoint without these two is one of Megatron's, and what it has takes their place.

The replicated state is pickled: read a checkpoint only from where you would run code from.
"""

from __future__ import annotations

import os
import pickle
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import load_sharded_metadata
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.utils import unwrap_model

from ray_etc.actors.phased import pairs_of_derived
from ray_etc.actors.small_state import SmallState, load_small_state
from ray_etc.actors.state import TrainState
from ray_etc.megatron import compat, corrections, mesh, remainders, streams
from ray_etc.planners.parallel import Coordinate, ParallelConfig, sources_of_streams

if TYPE_CHECKING:
    from ray.train import Checkpoint

TRACKER = "latest_checkpointed_iteration.txt"
REPLICATED, STREAMS = "ray_etc.replicated", "ray_etc.streams"
NO_TENSORS = ("common_state", "rng_state", "rerun_state", "ray_etc.")

# What Megatron's script passes to `sharded_state_dict` with --dist-ckpt-optim-fully-reshardable.
METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
# With ZeRO-1 Megatron saves the main weights under the first name, without it under the second.
MAIN_PARAMS = ("optimizer.state.param.", "optimizer.state.fp32_param.")


def save(
    state: TrainState,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    folder: str | Path,
    iteration: int,
) -> Path:
    """Write the state after `iteration` steps to `folder`/iter_0000123, and note it as the latest there.

    Every rank calls it at the same step, and all see the same `folder`.
    """
    compat.gather_weights(chunks)
    rank, parallel = dist.get_rank(), mesh.current()
    small, at = state.small_state(), parallel.coordinate(rank)
    packed = SmallState.of(state)
    tensor_ranks, stages = parallel.tensor_parallel, parallel.pipeline_parallel
    metadata = {**METADATA, "non_homogeneous_layers": _has_frozen_weights(chunks)}
    content = {
        **_sharded(chunks, optimizer, metadata, is_loading=False),
        "args": _arguments(unwrap_model(chunks[0]), parallel, small["replicated"]),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "rng_state": ShardedObject(
            "rng_state",
            [streams.to_megatron(small["streams"]["random"])],
            (stages, tensor_ranks),
            (at.pipeline, at.tensor),
            replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        ),
        REPLICATED: packed.replicated,
        STREAMS: ShardedObject(STREAMS, packed.streams, (parallel.world_size,), (rank,)),
    }
    if "scheduler" in small["replicated"]:
        content["opt_param_scheduler"] = small["replicated"]["scheduler"]
    place = Path(folder).absolute() / f"iter_{iteration:07d}"
    if rank == 0:
        place.mkdir(parents=True, exist_ok=True)
        # Megatron writes it last: what is there before is an older checkpoint, no longer whole from here on.
        (place / "metadata.json").unlink(missing_ok=True)
    dist.barrier()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), group)
    corrections.collect_results_of_saves_here()
    dist_checkpointing.save(content, str(place), strategy, content_metadata=metadata)
    if rank == 0:
        noted = Path(folder) / f".{TRACKER}"
        noted.write_text(str(iteration))
        os.replace(noted, Path(folder) / TRACKER)
    dist.barrier()
    return place


def load(
    state: TrainState,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    source: str | Path | Checkpoint,
) -> int:
    """Fill the state, which keeps its memory, from a checkpoint of any configuration.

    Args:
        source: a folder, or Ray Train's reference to one: of a checkpoint, or of several with a note of the latest.

    Returns:
        The steps that it has behind it.

    Raises:
        ValueError: it is not there, not whole, or not of this model: something is missing, or left over.
    """
    with nullcontext(source) if isinstance(source, str | Path) else source.as_directory() as folder:
        dist.barrier()  # a rank that comes late fetches again, over what the others of its node have
        return _load_from(_latest(Path(folder)), state, chunks, optimizer)


def _load_from(place: Path, state: TrainState, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> int:
    try:
        common = dist_checkpointing.load_common_state_dict(str(place))
        _load_tensors(state, chunks, optimizer, place, common)
        packed, held = _small_state(state, place, common)
    except CheckpointingException as error:
        raise ValueError(f"{place} is not a whole checkpoint of Megatron's: {error}") from error
    except KeyError as error:
        raise ValueError(f"the checkpoint {place} has no {error}, which this state needs; see --no-save-*") from error
    coordinate = mesh.current().coordinate(dist.get_rank())
    state.hold()  # Megatron has loaded the model's own buffers
    load_small_state(state, packed, held, coordinate, common["iteration"])
    return int(common["iteration"])


def _latest(folder: Path) -> Path:
    tracker = folder / TRACKER
    if not tracker.is_file():
        if (folder / "metadata.json").is_file():
            return folder
        raise ValueError(f"no checkpoint in {folder}: neither {TRACKER} nor metadata.json is there")
    iteration = tracker.read_text().strip()
    if not iteration.isdecimal():
        raise ValueError(
            f"{tracker} says {iteration!r}: weights without the rest of a training state; give an iteration"
        )
    return folder / f"iter_{int(iteration):07d}"


def _sharded(
    chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, metadata: Mapping[str, Any], *, is_loading: bool
) -> dict[str, Any]:
    corrections.require_checkpointable(optimizer)
    metadata = {**metadata, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    content: dict[str, Any] = {
        name: unwrap_model(chunk).sharded_state_dict(metadata=metadata) for name, chunk in _named(chunks)
    }
    with (
        corrections.true_ranges_in_checkpoints(optimizer),
        corrections.whole_main_weights(optimizer),
        corrections.memory_stays(optimizer),
    ):
        content["optimizer"] = optimizer.sharded_state_dict(content, is_loading=is_loading, metadata=metadata)
    return content


def _has_frozen_weights(chunks: Sequence[torch.nn.Module]) -> bool:
    """Whether any rank has: the optimizer state of all layers is then no whole stack, so each has a name."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    here = any(not weight.requires_grad for chunk in chunks for weight in chunk.parameters())
    dist.all_gather_object(by_rank, here)
    return any(by_rank)


def _named(chunks: Sequence[torch.nn.Module]) -> list[tuple[str, torch.nn.Module]]:
    return [(f"model{n}" if len(chunks) > 1 else "model", chunk) for n, chunk in enumerate(chunks)]


def _arguments(model: Any, parallel: ParallelConfig, replicated: Mapping[str, Any]) -> Namespace:
    """Those of Megatron's script that it looks at when it loads a checkpoint."""
    config = model.config
    return Namespace(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        tensor_model_parallel_size=parallel.tensor_parallel,
        pipeline_model_parallel_size=parallel.pipeline_parallel,
        context_parallel_size=parallel.context_parallel,
        expert_model_parallel_size=parallel.expert_parallel,
        expert_tensor_parallel_size=parallel.tensor_parallel_of_experts,
        data_parallel_size=parallel.data_parallel,
        world_size=parallel.world_size,
        consumed_train_samples=replicated.get("loader", {}).get("consumed_samples", 0),
        # Without it, it would take the layers of a HybridModel for those of a GPTModel, which are numbered otherwise.
        hybrid_layer_pattern=getattr(model, "hybrid_layer_pattern", None),
    )


def _parallel_of(arguments: Namespace) -> ParallelConfig:
    given = vars(arguments)
    return ParallelConfig(
        given["tensor_model_parallel_size"],
        given["pipeline_model_parallel_size"],
        given["data_parallel_size"],
        context_parallel=given.get("context_parallel_size", 1),
        expert_parallel=given.get("expert_model_parallel_size", 1),
        expert_tensor_parallel=given.get("expert_tensor_parallel_size"),
    )


# Tensors -------------------------------------------------------------------------------------------------------------


def _load_tensors(
    state: TrainState,
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer,
    place: Path,
    common: Mapping[str, Any],
) -> None:
    metadata = common.get("content_metadata") or METADATA
    sharding = metadata.get("distrib_optim_sharding_type", "fully_reshardable")
    if sharding != "fully_reshardable":
        raise ValueError(
            f"the optimizer state in {place} is {sharding!r}, which is bound to one configuration; save it with "
            "--dist-ckpt-optim-fully-reshardable"
        )
    content = _sharded(chunks, optimizer, {**METADATA, **metadata}, is_loading=True)
    # Data types by name; what is no tensor has none.
    saved = {item.key: getattr(item, "dtype", None) for item in load_sharded_metadata(str(place)).values()}
    if any(shard.tensor.kind in ("main_param", "main_param_remainder") for shard in state.shards):
        saved_as = next(
            (prefix for prefix in MAIN_PARAMS if any(key.startswith(prefix) for key in saved)), MAIN_PARAMS[0]
        )
        dict_list_map_inplace(lambda value: _main_params_as(saved_as, value), content["optimizer"])
    else:
        # An fp32 weight is its own main weight, which is saved once more with ZeRO-1 only.
        for part in _by_leaf(optimizer, content["optimizer"]):
            for tensors in part.get("param_state", {}).values():
                tensors.pop("param", None)
    _require_same(place, saved, content)
    # By itself, lest it be merged with the optimizer's settings of another rank in another configuration.
    loaded = dist_checkpointing.load({"tensors": content}, str(place))
    for name, chunk in _named(chunks):
        unwrap_model(chunk).load_state_dict(loaded["tensors"][name], strict=False)
    parts = _by_leaf(optimizer, loaded["tensors"]["optimizer"])
    for leaf, part in zip(compat.leaf_optimizers(optimizer), parts, strict=True):
        corrections.load_optimizer_tensors(leaf, part)
    for _, weight, main in pairs_of_derived(state.layout(), state.views(), state.derived):
        remainders.require_rounded(weight, main)


def _require_same(place: Path, saved: Mapping[str, torch.dtype | None], content: dict[str, Any]) -> None:
    """Raise ValueError, on every rank, where the checkpoint and all ranks together do not name the same tensors."""
    asked: dict[str, torch.dtype | None] = {}
    for value in nested_values(content):
        values = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        asked |= {value.key: getattr(value, "dtype", None) for value in values if isinstance(value, ShardedBase)}
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, asked)
    asked = {key: dtype for of_rank in by_rank for key, dtype in of_rank.items()}
    left_over = {key for key in saved.keys() - asked.keys() if not key.startswith((*MAIN_PARAMS, *NO_TENSORS))}
    unlike = {key for key in saved.keys() & asked.keys() if saved[key] != asked[key]}
    for problem, keys in (
        ("has no", asked.keys() - saved.keys()),
        ("is of another model: it has", left_over),
        ("is of another data type:", {f"{key} ({saved[key]}, not {asked[key]})" for key in unlike}),
    ):
        if keys:
            named = ", ".join(sorted(keys)[:3])
            raise ValueError(
                f"the checkpoint {place} {problem} {named}{f' and {len(keys) - 3} more' * (len(keys) > 3)}"
            )


def _by_leaf(optimizer: MegatronOptimizer, content: dict[Any, Any]) -> list[dict[Any, Any]]:
    """What belongs to each of several chained optimizers."""
    leaves = compat.leaf_optimizers(optimizer)
    return [content] if len(leaves) == 1 else [content[number] for number in range(len(leaves))]


def _main_params_as(prefix: str, value: Any) -> Any:
    for other in MAIN_PARAMS:
        if getattr(value, "key", "").startswith(other):
            return replace(value, key=prefix + value.key.removeprefix(other))
    return value


# Small state ---------------------------------------------------------------------------------------------------------


def _small_state(state: TrainState, place: Path, common: Mapping[str, Any]) -> tuple[bytes, dict[Coordinate, bytes]]:
    """The replicated state, and the streams that this rank may go on with, both packed."""
    old, here = _parallel_of(common["args"]), mesh.current().coordinate(dist.get_rank())
    if REPLICATED in common:
        by_rank = {old.coordinate(rank): (rank,) for rank in range(old.world_size)}
        held = _objects(place, STREAMS, (old.world_size,), by_rank, here)
        return common[REPLICATED], held
    # Megatron keeps the streams of the first replica of each stage and tensor index.
    grid = (old.pipeline_parallel, old.tensor_parallel)
    firsts = {
        old.coordinate(stage * old.stage_size + tensor): (stage, tensor)
        for stage in range(grid[0])
        for tensor in range(grid[1])
    }
    random = _objects(place, "rng_state", grid, firsts, here)
    packed = {at: pickle.dumps({"random": streams.from_megatron(states[0])}) for at, states in random.items()}
    replicated = _replicated_by_megatron(common)
    return pickle.dumps({name: replicated[name] for name in state.replicated}), packed


def _objects(
    place: Path,
    key: str,
    shape: tuple[int, ...],
    held: Mapping[Coordinate, tuple[int, ...]],
    wanted: Coordinate,
) -> dict[Coordinate, Any]:
    """Of the objects under `key` those of use here, by the coordinates of the ranks that wrote them."""
    objects = {str(at): ShardedObject(key, None, shape, held[at]) for at in sources_of_streams(held, wanted)}
    loaded = dist_checkpointing.load(
        {"objects": objects}, str(place), validate_access_integrity=False, strict="raise_unexpected"
    )
    return {at: loaded["objects"][str(at)] for at in held if str(at) in objects}


def _replicated_by_megatron(common: Mapping[str, Any]) -> dict[str, Any]:
    optimizer = common["optimizer"]
    leaves = [optimizer[number] for number in sorted(optimizer)] if 0 in optimizer else [optimizer]
    scales = [leaf["grad_scaler"] for leaf in leaves if "grad_scaler" in leaf]
    counted = [step for leaf in leaves if (step := corrections.saved_step(leaf)) is not None]
    return {
        "optimizer": {
            "step": max(counted, default=common["iteration"]),  # only Adam counts
            "grad_scalers": {False: scales[0], True: scales[-1]} if scales else {},
        },
        "scheduler": common.get("opt_param_scheduler"),
        "loader": {"consumed_samples": common["args"].consumed_train_samples},
    }
