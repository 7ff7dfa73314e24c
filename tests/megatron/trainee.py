"""A model of models.py with its optimizer and its data, under a parallel configuration, as a user's script makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from fused_adam import in_place_of_transformer_engine
from grouped import group_experts
from hybrid import hybrid_spec
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.utils import unwrap_model
from models import BASE, MICRO_BATCH_SIZE, MODELS, OPTIMIZER, SEQUENCE

import ray_etc.megatron
from ray_etc.actors.session import is_first_generation
from ray_etc.megatron import cpu, mesh
from ray_etc.megatron.spec import context_positions, local_block_spec, local_mtp_spec
from ray_etc.megatron.streams import seed_streams
from ray_etc.planners.parallel import ParallelConfig


class Trainee:
    """What `make` returns; it has what a `ray_etc.megatron.Task` has."""

    def __init__(
        self, parallel: ParallelConfig, model: Mapping[str, Any], optimizer: Mapping[str, Any], batch_size: int
    ) -> None:
        cpu.install()
        given, settings = {**BASE, **model}, {**OPTIMIZER, **optimizer}
        self._parallel = parallel
        self._batch_size = batch_size
        self.consumed_samples = 0
        self.config = SimpleNamespace(vocab_size=given.pop("vocab_size", 29))
        self._heads = given.get("mtp_num_layers")
        dtype = settings.pop("dtype", torch.float32)
        instances = settings.pop("instances", 1)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=parallel.distributed_optimizer,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=settings.pop("overlap_grad_reduce", False),
            overlap_param_gather=settings.pop("overlap_param_gather", False),
            bucket_size=settings.pop("bucket_size", None),
            num_distributed_optimizer_instances=instances,
        )
        mesh.initialize(parallel, num_distributed_optimizer_instances=instances)
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank=dist.get_rank(),
            global_batch_size=batch_size,
            micro_batch_size=MICRO_BATCH_SIZE,
            data_parallel_size=parallel.data_parallel,
            step_batch_size_schedule=settings.pop("batch_size_schedule", None),
        )
        seed_streams(7, parallel_state.get_pipeline_model_parallel_rank())
        self.chunks = self._chunks(given, dtype, ddp)
        with in_place_of_transformer_engine(settings.pop("fused_adam", False)):
            self.optimizer = get_megatron_optimizer(
                OptimizerConfig(
                    **settings,
                    bf16=dtype == torch.bfloat16,
                    fp16=dtype == torch.float16,
                    params_dtype=dtype,
                    use_distributed_optimizer=parallel.distributed_optimizer,
                ),
                self.chunks,
            )
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
            chunk.config.finalize_model_grads_func = finalize_model_grads
        self.scheduler = OptimizerParamScheduler(
            self.optimizer, 0.0, 1e-2, 1e-3, 2 * batch_size, 20 * batch_size, "linear", 0.01, 0.01, 1, "constant"
        )
        self.state = ray_etc.megatron.state(
            self.chunks,
            self.optimizer,
            scheduler=self.scheduler,
            loader=self,
            vocab_size=self.config.vocab_size,
        )

    def _chunks(self, given: dict[str, Any], dtype: torch.dtype, ddp: DistributedDataParallelConfig) -> list[Any]:
        given = dict(given)
        vocab = -(-self.config.vocab_size // self._parallel.tensor_parallel) * self._parallel.tensor_parallel
        shared = {
            "vocab_size": vocab,
            "max_sequence_length": SEQUENCE,
            "share_embeddings_and_output_weights": given.pop("is_tied", False),
            "position_embedding_type": given.pop("position", "rope"),
        }
        is_grouped = given.pop("is_grouped", False)
        in_fp32, frozen_layers = given.pop("in_fp32", ()), given.pop("frozen_layers", 0)
        pattern = given.pop("hybrid_layer_pattern", None)
        if pattern and (self._parallel.virtual_pipeline > 1 or self._parallel.pipeline_layers):
            ends = list(accumulate(self._parallel.layers_of_virtual_stages(given["num_layers"]), initial=0))
            layers, *heads = pattern.split("/")
            pattern = "/".join(["|".join(layers[first:end] for first, end in pairwise(ends)), *heads])
        config_type = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
        axes = mesh.transformer_arguments(self._parallel, given["num_layers"], given.get("mtp_num_layers") or 0)
        if given.pop("uneven_by_ends", False) and self._parallel.pipeline_layers:  # the other way to say it
            layers = self._parallel.pipeline_layers
            axes["pipeline_model_parallel_layout"] = None
            axes["num_layers_in_first_pipeline_stage"] = layers[0]
            axes["num_layers_in_last_pipeline_stage"] = layers[-1]
        config = config_type(
            **given,
            **axes,
            bf16=dtype == torch.bfloat16,
            fp16=dtype == torch.float16,
            params_dtype=dtype,
            pipeline_dtype=dtype,
            perform_initialization=is_first_generation(),
        )
        chunks = []
        for number in range(self._parallel.virtual_pipeline):
            stage = None if self._parallel.virtual_pipeline == 1 else number
            place = {"ignore_virtual": False, "vp_stage": stage} if stage is not None else {}
            here = {
                **shared,
                "pre_process": parallel_state.is_pipeline_first_stage(**place),
                "post_process": parallel_state.is_pipeline_last_stage(**place),
                "vp_stage": stage,
            }
            module: torch.nn.Module
            if pattern is None:
                block = local_block_spec(config, stage)
                for layer in block.layer_specs if is_grouped else ():
                    group_experts(layer)
                module = GPTModel(config, block, **here, mtp_block_spec=local_mtp_spec(config, block, stage))
            else:
                module = HybridModel(config, hybrid_spec(config), **here, hybrid_layer_pattern=pattern)
            module.to(torch.cuda.current_device())  # learned positions, for one, are made on the host
            _zero_padding(module, self.config.vocab_size)
            if dtype != torch.float32:
                module = Float16Module(config, module)
            for name, weight in module.named_parameters():
                if name.endswith(in_fp32):
                    weight.data = weight.data.float()
            stack: Any = unwrap_model(module)
            for layer in stack.decoder.layers:
                if layer.layer_number <= frozen_layers:
                    layer.requires_grad_(False)
            chunks.append(DistributedDataParallel(config, ddp, module, disable_bucketing=number > 0))
        return chunks

    def train_step(self) -> dict[str, Any]:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = [self._batch(number) for number in range(get_num_microbatches())]
        iterators = [iter(batches) for _ in self.chunks]
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=SEQUENCE,
            micro_batch_size=MICRO_BATCH_SIZE,
            forward_only=False,
        )
        is_updated, grad_norm, _ = self.optimizer.step()
        samples = len(batches) * MICRO_BATCH_SIZE * self._parallel.data_parallel
        self.consumed_samples += samples
        if is_updated:
            self.scheduler.step(samples)  # Megatron's script counts samples, too
        num_microbatches_calculator.update_num_microbatches(self.consumed_samples, consistency_check=False)
        return {"losses": losses, "is_updated": is_updated, "grad_norm": float(grad_norm or 0.0), "samples": samples}

    def _batch(self, micro_batch: int) -> torch.Tensor:
        first = (
            micro_batch * self._parallel.data_parallel + parallel_state.get_data_parallel_rank()
        ) * MICRO_BATCH_SIZE
        samples = range(self.consumed_samples + first, self.consumed_samples + first + MICRO_BATCH_SIZE)
        size = (SEQUENCE + 1,)
        return torch.stack(
            [torch.randint(self.config.vocab_size, size, generator=torch.Generator().manual_seed(n)) for n in samples]
        ).to(torch.cuda.current_device())

    def _forward(self, batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Callable[..., Any]]:
        tokens = next(batches)
        ranks = self._parallel.context_parallel
        held = context_positions(SEQUENCE, ranks, parallel_state.get_context_parallel_rank()).to(tokens.device)
        labels = tokens[:, held + 1]
        # Only with labels does the model train more heads than one.
        output = model(tokens[:, held], held.expand(len(tokens), -1), None, labels=labels if self._heads else None)

        def mean(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            if not self._heads:
                logits = output.float().masked_fill(_padded_columns(self.config.vocab_size, output), -torch.inf)
                output = vocab_parallel_cross_entropy(logits, labels)
            loss = output.float().mean()
            return loss / ranks, {"loss": loss.item()}

        return output, mean

    # The cursor of its data.

    def state_dict(self) -> dict[str, Any]:
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed_samples = state_dict["consumed_samples"]


def trainee(model: str, optimizer: Mapping[str, Any], batch_size: int, **change: Any) -> Callable[..., Trainee]:
    """What makes the model of that name, changed, under a parallel configuration."""
    return partial(Trainee, model={**MODELS[model], **change}, optimizer=optimizer, batch_size=batch_size)


def _padded_columns(vocab_size: int, logits: torch.Tensor) -> torch.Tensor:
    first = parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
    return torch.arange(first, first + logits.shape[-1], device=logits.device) >= vocab_size


@torch.no_grad()
def _zero_padding(module: Any, vocab_size: int) -> None:
    """Rows of the vocabulary's padding are no part of the state that moves, so they must not be as memory was."""
    for name, weight in module.named_parameters():
        if name.endswith("word_embeddings.weight") or name == "output_layer.weight":
            first = parallel_state.get_tensor_model_parallel_rank() * weight.shape[0]
            weight[max(vocab_size - first, 0) :].zero_()
