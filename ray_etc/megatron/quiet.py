"""What Megatron-core says at each start that a user can do nothing about, so that each rank need not say it."""

import logging
import warnings

# Missing optional packages, deprecations among its own modules, reads of `.grad` on its own views, renamed collectives.
warnings.filterwarnings("ignore", module=r"megatron\.core")
warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)


class _Without(logging.Filter):
    """Drops the messages that hold a phrase."""

    def filter(self, record: logging.LogRecord) -> bool:
        return self.name not in str(record.msg)


for module, phrase in (
    ("megatron.core.models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("megatron.core.distributed.distributed_data_parallel", "full_param_layout not provided"),
    ("torch.utils.cpp_extension", "No CUDA runtime is found"),
):
    logging.getLogger(module).addFilter(_Without(phrase))
