"""The training state of any Megatron-core model, optimizer, scheduler and loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ray_etc.actors.session import is_first_generation
from ray_etc.actors.state import Stateful, StateShard, TrainState
from ray_etc.megatron import batches, compat
from ray_etc.megatron import checkpoint as checkpoints
from ray_etc.megatron.describe import describe
from ray_etc.megatron.streams import RandomStreams
from ray_etc.planners.parallel import ParallelConfig

if TYPE_CHECKING:
    from ray.train import Checkpoint


def state(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    optimizer: MegatronOptimizer,
    *,
    scheduler: OptimizerParamScheduler | None = None,
    loader: Stateful | None = None,
    vocab_size: int | None = None,
    check_parallel: Callable[[ParallelConfig], None] | None = None,
    seed: int = 1234,
    checkpoint: str | Path | Checkpoint | None = None,
    **more: Stateful,
) -> MegatronState:
    """Everything that a resize must carry over, from objects made as in any Megatron-core script.

    Args:
        model: a MegatronModule, or the list of chunks of a virtual pipeline, wrapped in DDP or not.
        optimizer: what `get_megatron_optimizer` returned. What is loaded into it otherwise than by `checkpoint` must
            be loaded before, since that may put other tensors into it.
        scheduler: Megatron's learning-rate scheduler.
        loader: the data loader, or its cursor: anything with `state_dict` and `load_state_dict` that is equal on
            all ranks. If it counts `consumed_samples`, Megatron's microbatch calculator follows it, and where that has
            a schedule of batch sizes, it must.
        vocab_size: the size of the vocabulary before padding. Padding depends on tensor parallelism, so without
            this a model whose vocabulary is padded cannot change its tensor parallelism.
        check_parallel: raises ValueError for a configuration that the model cannot be split by. Besides, all global
            batches of Megatron's microbatch calculator that are to come must divide over its replicas.
        seed: seeds the random streams of coordinates that an old generation did not have; see `streams`.
        checkpoint: a Megatron distributed checkpoint of any configuration to start from: one of ours or of Megatron's
            own script, or a folder of several, of which it is the latest. It is a path, or a `ray.train.Checkpoint`,
            which each node fetches first where it is in remote storage. Generations after the first take the state from
            the one before them.
        more: further small state, equal on all ranks, by name.
    """
    chunks = [model] if isinstance(model, torch.nn.Module) else list(model)
    for name, item in more.items():
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            raise ValueError(f"{name} is a {type(item).__name__} without state_dict and load_state_dict")
    # Megatron changes the buffers of routers before an update, with the gradients.
    shards, changed_early = _with_copies(describe(chunks, optimizer, vocab_size), kind="buffer")
    if not shards:
        raise ValueError("this rank holds no tensor: its pipeline stage has no layers; give each stage one")
    calculator = compat.microbatch_calculator()
    if calculator is not None and len(compat.batch_schedule(calculator)) > 1 and _samples_of(loader) is None:
        raise ValueError(
            "the global batch follows a schedule of samples (step_batch_size_schedule), and the loader does not say "
            "how many it has given: give it an attribute consumed_samples"
        )
    progress = OptimizerProgress(optimizer, chunks)
    replicated: dict[str, Stateful] = {"optimizer": progress}
    if scheduler is not None:
        replicated["scheduler"] = SchedulerProgress(scheduler)
    if loader is not None:
        replicated["loader"] = LoaderProgress(loader)
    if taken := sorted(set(more) & set(replicated)):
        raise ValueError(f"the name {taken[0]!r} is taken by the state's own {taken[0]}; choose another")

    def check(parallel: ParallelConfig) -> None:
        if check_parallel is not None:
            check_parallel(parallel)
        batches.require_shared(parallel, _samples_of(loader))

    train_state = MegatronState(
        chunks,
        optimizer,
        shards,
        replicated={**replicated, **more},
        streams={"random": RandomStreams(seed)},
        scratch=compat.gradient_buffers(chunks),
        derived={
            ("param", shard.tensor.name): shard.tensor.key for shard in shards if shard.tensor.kind == "main_param"
        },
        changed_early=changed_early,
        optimizers=[leaf.optimizer for leaf in compat.leaf_optimizers(optimizer)],
        updates_tried=lambda: progress.tried,
        check_parallel=check,
    )
    if checkpoint is not None and is_first_generation():
        train_state.next_step = checkpoints.load(train_state, chunks, optimizer, checkpoint)
    return train_state


def _with_copies(
    shards: Sequence[StateShard], kind: str
) -> tuple[list[StateShard], list[tuple[torch.Tensor, torch.Tensor]]]:
    """The shards with copies in place of those of `kind`; (tensor, copy) of each."""
    pairs = [(shard.view, shard.view.clone()) for shard in shards if shard.tensor.kind == kind]
    copies = iter(pairs)
    return [replace(each, view=next(copies)[1]) if each.tensor.kind == kind else each for each in shards], pairs


class MegatronState(TrainState):
    """What `state` returns: a `TrainState` that can be written as a Megatron distributed checkpoint."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer, shards: Sequence[StateShard], **more: Any
    ) -> None:
        super().__init__(shards, **more)
        self._chunks, self._optimizer = list(chunks), optimizer

    def check_memory(self) -> None:
        """Raise ValueError where a checkpoint, loaded after the state was made, has put other tensors in use."""
        leaves = compat.leaf_optimizers(self._optimizer)
        used = [tensor for leaf in leaves for *_, tensors in compat.owned_state(leaf) for tensor in tensors.values()]
        for chunk in self._chunks:
            used += [*chunk.parameters(), *(buffer for _, buffer in chunk.named_buffers())]  # `buffers` is DDP's own
        storages = {tensor.untyped_storage().data_ptr() for tensor in used}
        live = {id(held): tensor for tensor, held in self.changed_early}
        for shard in self.shards:
            if live.get(id(shard.view), shard.view).untyped_storage().data_ptr() not in storages:
                raise ValueError(
                    f"the {shard.tensor.kind} of {shard.tensor.name} is another tensor than when "
                    "ray_etc.megatron.state was called; load checkpoints before that, or with its argument `checkpoint`"
                )

    def save_checkpoint(self, folder: str | Path, iteration: int) -> Path:
        """Write the state as it is after `iteration` steps, in the format of Megatron's own training script.

        Every rank calls it at the same step, and all see the same `folder`. Returns the checkpoint's own folder in it.
        """
        return checkpoints.save(self, self._chunks, self._optimizer, folder, iteration)


class OptimizerProgress:
    """All that an optimizer has besides its tensors: Adam's step count, and the loss scales where there are some."""

    def __init__(self, optimizer: MegatronOptimizer, chunks: Sequence[torch.nn.Module]) -> None:
        self._chunks = chunks
        self._leaves = compat.leaf_optimizers(optimizer)
        # Adam counts its steps beside each parameter, and a rank may own none: ZeRO-1 over more ranks than there are
        # elements. So each rank counts for itself too.
        self._steps = max(compat.adam_step(leaf) for leaf in self._leaves)
        self.tried = 0
        """Updates that were begun, also where a gradient that overflows, or is too large, has them skipped."""
        for leaf in self._leaves:
            compat.tell_of_tries(leaf, self._count_try)
        self._leaves[0].optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._steps += 1

    def _count_try(self) -> None:
        self.tried += 1

    def state_dict(self) -> dict[str, Any]:
        scales = {compat.is_for_experts(leaf): scaler.state_dict() for leaf, scaler in self._scaled_leaves()}
        if False in scales:
            # Experts without a mesh of their own are scaled as everything else.
            scales.setdefault(True, scales[False])
        return {"step": max([compat.adam_step(leaf) for leaf in self._leaves]) or self._steps, "grad_scalers": scales}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["step"]
        for leaf in self._leaves:
            compat.set_adam_step(leaf, state_dict["step"])
        for leaf, scaler in self._scaled_leaves():
            scaler.load_state_dict(state_dict["grad_scalers"][compat.is_for_experts(leaf)])
        # All ranks are here, after each has got its own range of the weights.
        compat.gather_weights(self._chunks, unless_by_forward=True)

    def _scaled_leaves(self) -> list[tuple[MegatronOptimizer, Any]]:
        scalers = [(leaf, getattr(leaf, "grad_scaler", None)) for leaf in self._leaves]
        return [(leaf, scaler) for leaf, scaler in scalers if scaler]


class SchedulerProgress:
    """A scheduler that can be loaded at any time: Megatron's own load adds to the steps that it has already taken."""

    def __init__(self, scheduler: OptimizerParamScheduler) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return self._scheduler.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._scheduler.num_steps = 0
        self._scheduler.load_state_dict(state_dict)


class LoaderProgress:
    """The loader's cursor, which Megatron's microbatch calculator follows."""

    def __init__(self, loader: Stateful) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)
        if (samples := _samples_of(self._loader)) is not None:
            batches.follow(samples)


def _samples_of(loader: Any) -> int | None:
    return getattr(loader, "consumed_samples", None)
