"""What Megatron-core says at each start that a user can do nothing about, so that each rank need not say it."""

import logging
import warnings

# Missing optional packages, deprecations among its own modules, reads of `.grad` on its own views, renamed collectives.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
# Where a checkpoint is read: how Megatron calls torch, and that each rank reads what all have in common by itself.
for message in (
    r"torch\.distributed is disabled, unavailable or uninitialized",
    "The argument order of load has been changed",
    "Please use DTensor instead and we are deprecating ShardedTensor",
):
    warnings.filterwarnings("ignore", message=message, module=r"torch\.distributed\.checkpoint")


class _Without(logging.Filter):
    """Drops the messages that hold a phrase."""

    def filter(self, record: logging.LogRecord) -> bool:
        return self.name not in str(record.msg)


for module, phrase in (
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided"),
    ("megatron.core.dist_checkpointing.strategies.torch", "MCore's async save is deprecated"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
):
    logging.getLogger(module).addFilter(_Without(phrase))
