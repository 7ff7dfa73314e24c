"""A model in training: one step of the global batch, and the state that a resize carries over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

from ray_etc.megatron import batches
from ray_etc.megatron.config import BatchConfig, GPTConfig
from ray_etc.megatron.data import SampleLoader
from ray_etc.megatron.spec import context_positions
from ray_etc.megatron.state import MegatronState


class Task:
    """What `build` returns: a model with its optimizer, scheduler, data and state, ready for `train_step`."""

    def __init__(
        self,
        config: GPTConfig,
        batch: BatchConfig,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        loader: SampleLoader,
        state: MegatronState,
    ) -> None:
        self.config = config
        self.batch = batch
        self.chunks = chunks
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loader = loader
        self.state = state
        self._device = next(chunks[0].parameters()).device
        self._padding = _padded_columns(config, self._device)
        # What this rank has of each sequence.
        self._parts = parallel_state.get_context_parallel_world_size()
        rank = parallel_state.get_context_parallel_rank()
        self._positions = context_positions(config.sequence_length, self._parts, rank).to(self._device)

    def train_step(self) -> dict[str, Any]:
        """Train on the next global batch; see `train_on`."""
        return self.train_on(get_num_microbatches())

    def train_on(self, micro_batch_count: int) -> dict[str, Any]:
        """Train on the first micro-batches of each replica's part of the next global batch: few for a rehearsal.

        Returns:
            `loss`: the mean over the global batch, the same number on every rank; `grad_norm`, before clipping;
            `lr`; `tokens` of the global batch; `sample_ids`: the numbers of the samples that this rank's
            data-parallel replica trained on.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sample_ids: list[int] = []
        batch_size = self.batch.size_after(self.loader.consumed_samples)
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=self._iterators(sample_ids),
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=micro_batch_count,
            seq_length=self.config.sequence_length,
            micro_batch_size=self.batch.micro_batch_size,
            forward_only=False,
        )
        # Agreed on before the update: a collective after it could leave ranks on different sides of the step.
        loss = self._mean_loss(losses, batch_size)
        lr = self.scheduler.get_lr({})
        _, grad_norm, _ = self.optimizer.step()
        self.scheduler.step(1)
        self.loader.advance()
        batches.follow(self.loader.consumed_samples)
        return {
            "loss": loss,
            "grad_norm": float(grad_norm or 0.0),
            "lr": lr,
            "tokens": batch_size * self.config.sequence_length,
            "sample_ids": sample_ids,
        }

    def save_checkpoint(self, folder: str | Path) -> Path:
        """Write the state as it is now as a Megatron distributed checkpoint; see `MegatronState.save_checkpoint`."""
        return self.state.save_checkpoint(folder, self.state.replicated["optimizer"].state_dict()["step"])

    def _iterators(self, sample_ids: list[int]) -> Any:
        """One over the micro-batches for each chunk, or just one, as Megatron's schedules want them."""
        # Read ahead: under pipeline parallelism a stage in the middle never asks for its data.
        read = []
        for numbers, tokens in self.loader.micro_batches():
            sample_ids.extend(numbers)
            read.append(tokens.to(self._device, non_blocking=True))
        return [iter(read) for _ in self.chunks] if len(self.chunks) > 1 else iter(read)

    def _forward(
        self, batches: Iterator[torch.Tensor], model: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]]:
        tokens = next(batches)
        inputs, targets = tokens[:, self._positions], tokens[:, self._positions + 1]
        # No mask: the attention of a GPT is causal by itself.
        output = model(inputs, self._positions.expand_as(inputs), None)

        def loss(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            logits = logits.float()
            if self._padding is not None:
                logits = logits.masked_fill(self._padding, -torch.inf)
            # Megatron's schedule multiplies the loss by the parts of a sequence.
            mean = vocab_parallel_cross_entropy(logits, targets).mean() / self._parts
            # A copy: Megatron divides the first one in place by the number of micro-batches.
            return mean, {"loss": mean.detach().clone()}

        return output, loss

    def _mean_loss(self, losses: list[dict[str, torch.Tensor]], batch_size: int) -> float:
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        # Only the last stage has losses, and its tensor-parallel ranks all have the same.
        if parallel_state.is_pipeline_last_stage() and parallel_state.get_tensor_model_parallel_rank() == 0:
            total += sum(micro["loss"].double() for micro in losses)
        dist.all_reduce(total)
        return total.item() * self.batch.micro_batch_size / batch_size


def _padded_columns(config: GPTConfig, device: torch.device) -> torch.Tensor | None:
    """Which of this rank's logits belong to no word; None where all do."""
    tensor_parallel = parallel_state.get_tensor_model_parallel_world_size()
    columns = config.padded_vocab_size(tensor_parallel) // tensor_parallel
    first = parallel_state.get_tensor_model_parallel_rank() * columns
    padding = torch.arange(first, first + columns, device=device) >= config.vocab_size
    return padding if bool(padding.any()) else None
