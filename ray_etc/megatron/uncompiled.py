"""Megatron-core, imported without torch's compiler where there is no GPU.

Megatron hands small functions to torch.compile as it is imported, and the first loads the whole compiler: a fifth of
the start of a rank. Without a GPU none of them is ever compiled (see `cpu.py`), so there each stays what it is.
"""

from typing import Any

import torch


def _as_it_is(function: Any = None, **options: Any) -> Any:
    return _as_it_is if function is None else function


if not torch.cuda.is_available():
    compile_ = torch.compile
    torch.compile = _as_it_is  # type: ignore[assignment]
    try:
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.models.gpt.gpt_model  # noqa: F401
    finally:
        torch.compile = compile_
