"""The Megatron-core adapter: a GPT to train, and the training state of any Megatron-core model.

`build` makes a Llama-shaped GPT with its optimizer and data. `state` takes a model, optimizer, scheduler and loader
that you made yourself. Either way the result is a `TrainState`, which names each tensor of the training state by its
place in the whole model, so that it can be moved to any other parallel configuration.
"""

from ray_etc.megatron import quiet as quiet  # first: it hushes warnings of the imports below
from ray_etc.megatron import uncompiled as uncompiled  # second: it imports Megatron
from ray_etc.megatron.build import build
from ray_etc.megatron.config import BatchConfig, GPTConfig, OptimizerSettings, check_parallel
from ray_etc.megatron.state import state
from ray_etc.megatron.task import Task

__all__ = ["BatchConfig", "GPTConfig", "OptimizerSettings", "Task", "build", "check_parallel", "state"]
