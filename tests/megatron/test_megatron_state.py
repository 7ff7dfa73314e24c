"""The state of a model that ray_etc did not build."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from logical import RankShards, read, whole
from ranks import run_ranks

from ray_etc.actors.state import TrainState

HIDDEN, HEADS, LAYERS, VOCAB, SEQUENCE, BATCH = 16, 4, 4, 13, 8, 2


class Cursor:
    """A user's own loader."""

    def __init__(self) -> None:
        self.consumed_samples = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vars(self).update(state_dict)


class Own:
    """GPT-2's shape: layer norms, biases, learned positions, tied embeddings; by chunks of a virtual pipeline."""

    def __init__(self, pp: int = 1, vp: int | None = None) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ray_etc.megatron import cpu

        cpu.install()
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vp
        )
        model_parallel_cuda_manual_seed(1 + parallel_state.get_pipeline_model_parallel_rank())
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=HEADS,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            pipeline_dtype=torch.float32,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            finalize_model_grads_func=finalize_model_grads,
        )
        self.chunks = []
        for chunk in range(vp or 1):
            stage = {"ignore_virtual": False, "vp_stage": chunk} if vp else {}
            model = GPTModel(
                config,
                get_gpt_layer_local_spec(),
                vocab_size=VOCAB,
                max_sequence_length=SEQUENCE,
                pre_process=parallel_state.is_pipeline_first_stage(**stage),
                post_process=parallel_state.is_pipeline_last_stage(**stage),
                share_embeddings_and_output_weights=True,
                vp_stage=chunk if vp else None,
            )
            ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
            self.chunks.append(DistributedDataParallel(config, ddp, model))
        settings = OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-3, use_distributed_optimizer=True)
        self.optimizer = get_megatron_optimizer(settings, self.chunks)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 1e-2, 1e-2, 1e-3, 0, 10, "linear", 0.01, 0.01, 1, "constant"
        )
        self.loader = Cursor()

    def train_step(self) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        generator = torch.Generator().manual_seed(self.loader.consumed_samples)
        tokens = torch.randint(VOCAB, (4, BATCH, SEQUENCE), generator=generator)

        def forward(batches: Any, model: torch.nn.Module) -> Any:
            batch = next(batches)
            positions = torch.arange(SEQUENCE).expand_as(batch)
            return model(batch, positions, None, labels=batch), lambda losses: (losses.mean(), {})

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [iter(tokens) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators if len(self.chunks) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(tokens),
            seq_length=SEQUENCE,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        self.optimizer.step()
        self.scheduler.step(1)
        self.loader.consumed_samples += 4 * BATCH

    def state(self, **more: Any) -> TrainState:
        import ray_etc.megatron

        return ray_etc.megatron.state(
            self.chunks, self.optimizer, scheduler=self.scheduler, loader=self.loader, vocab_size=VOCAB, **more
        )


def own_shards(pp: int, vp: int | None) -> RankShards:
    own = Own(pp, vp)
    state = own.state()
    own.train_step()
    return read(state)


def test_chunks_of_a_virtual_pipeline() -> None:
    tensors = whole(run_ranks(own_shards, 2, 2, 2))
    (one,) = run_ranks(own_shards, 1, 1, None)
    assert {key: t.shape for key, t in tensors.items()} == {key: t.shape for key, t in whole([one]).items()}
    names = {name for kind, name in tensors if kind == "exp_avg"}
    assert {f"decoder.layers.{layer}.mlp.linear_fc1.bias" for layer in range(LAYERS)} <= names
    assert {"embedding.word_embeddings.weight", "embedding.position_embeddings.weight"} <= names


def test_small_state_goes_to_fresh_objects() -> None:
    def train() -> dict[str, Any]:
        own = Own()
        state = own.state(mine=Cursor())
        for _ in range(3):
            own.train_step()
        return state.small_state()

    def take(small: dict[str, Any]) -> tuple[Any, ...]:
        own = Own()
        state = own.state(mine=Cursor())
        for _ in range(2):  # twice: Megatron's own scheduler would count the steps double
            for name, item in state.replicated.items():
                item.load_state_dict(small["replicated"][name])
        again = state.small_state()["replicated"]
        return again, own.scheduler.num_steps, own.optimizer.param_groups[0]["lr"], own.loader.consumed_samples

    (small,) = run_ranks(train, 1)
    ((again, num_steps, lr, consumed_samples),) = run_ranks(take, 1, small)
    assert again == small["replicated"]
    assert sorted(again) == ["loader", "mine", "optimizer", "scheduler"]
    assert again["optimizer"]["step"] == num_steps == 3
    assert lr == pytest.approx(1e-3 + (1e-2 - 1e-3) * 0.7)
    assert consumed_samples == 3 * 4 * BATCH


def test_what_cannot_be_moved_is_said_at_once() -> None:
    def without_a_state_dict() -> str:
        with pytest.raises(ValueError, match="mine") as refused:
            Own().state(mine=3)
        return str(refused.value)

    def with_a_checkpoint_loaded_after_it() -> str:
        own = Own()
        state = own.state()
        state.check_memory()
        adam = own.optimizer.chained_optimizers[0].optimizer
        adam.load_state_dict(deepcopy(adam.state_dict()))
        with pytest.raises(ValueError, match="load checkpoints before that") as refused:
            state.check_memory()
        return str(refused.value)

    assert "is another tensor than when ray_etc.megatron.state" in run_ranks(with_a_checkpoint_loaded_after_it, 1)[0]
    assert run_ranks(without_a_state_dict, 1) == ["mine is a int without state_dict and load_state_dict"]


def emptied_and_filled() -> tuple[bool, list[float], int, list[str]]:
    """A step, after all memory of the state was freed and given back, against the same step before that."""
    from tiny import ONE, build

    from ray_etc.actors.memory import StateMemory
    from ray_etc.actors.phased import check_derived
    from ray_etc.actors.small_state import SmallState, load_small_state
    from ray_etc.planners.parallel import Coordinate

    task = build(ONE, bf16=True, dropout=0.1)
    task.train_step()
    state = task.state
    check_derived(state.layout(), state.views(), state.derived)
    kept, small = [view.detach().clone() for view in state.views()], SmallState.of(state)
    losses = [task.train_step()["loss"]]
    weights = [view.detach().clone() for view in state.views()]
    memory = StateMemory(state.views(), state.scratch)
    memory.empty()
    left = sum(view.untyped_storage().nbytes() for view in [*state.views(), *state.scratch])
    memory.fill()
    for view, value in zip(state.views(), kept, strict=True):
        view.detach().copy_(value)
    here = Coordinate(0, 0, 0)
    load_small_state(state, small.replicated, {here: small.streams}, here, 1)
    losses.append(task.train_step()["loss"])
    same = all(torch.equal(view, value) for view, value in zip(state.views(), weights, strict=True))
    undescribed = [
        s.tensor.name for s in state.shards if s.tensor.kind == "param" and s.tensor.key not in state.derived
    ]
    return same, losses, left, undescribed


def test_memory_freed_and_given_back_is_the_memory_that_megatron_trains() -> None:
    [(same, losses, left, undescribed)] = run_ranks(emptied_and_filled, 1)
    assert losses[0] == losses[1]
    assert same
    assert left == 0
    assert undescribed == []
