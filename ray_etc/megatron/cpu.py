"""Megatron-core without a GPU: the few places where it takes CUDA for granted, made to mean the CPU.

`install()` patches torch for the whole process, so it is called explicitly, and it does nothing where there is a
GPU. The gloo backend needs no patch: point-to-point, reduce-scatter and coalesced all-gather work as they are.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_FACTORIES = ("arange", "empty", "empty_like", "full", "ones", "tensor", "zeros", "zeros_like")
_installed = False


class _Stream:
    """A stream or an event on a machine where everything runs in order anyway."""

    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def _nothing(self, *args: Any, **kwargs: Any) -> None: ...

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self


def install() -> bool:
    """Make Megatron-core run on this machine's CPUs; returns whether anything was patched.

    Call it before a Megatron model, optimizer or process group is made. Calling it again changes nothing.
    """
    global _installed
    if torch.cuda.is_available():
        logger.info("this machine has GPUs: Megatron-core is left as it is")
        return False
    if not _installed:
        _never_compile()
        _devices_are_the_cpu()
        _tensors_say_cuda()
        _streams_are_nothing()
        _cuda_generator_is_the_cpu_generator()
        _counts_of_tokens_are_numpy()
        _installed = True
    return True


def _never_compile() -> None:
    """Megatron decorates small functions with torch.compile; on CPUs that costs minutes and needs a C++ compiler."""
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch.compiler.set_stance("force_eager")


def _devices_are_the_cpu() -> None:
    """`device=torch.cuda.current_device()`, `device="cuda"`, `pin_memory=True` and `.cuda()` are all over Megatron."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment, return-value]
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and str(device).startswith("cuda"):
            kwargs["device"] = _CPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return factory(*args, **kwargs)

    return wrapped


def _tensors_say_cuda() -> None:
    """The optimizers sort parameters by `param.type() == "torch.cuda.FloatTensor"` and refuse every other answer."""
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        asked = not args and not kwargs
        if asked and isinstance(answer, str) and not answer.startswith("torch.cuda."):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.type = type_  # type: ignore[method-assign, assignment]


def _streams_are_nothing() -> None:
    """Pipeline communication and gradient buffers synchronise with streams that do not exist here."""
    stream = _Stream()

    def enter(_: Any) -> AbstractContextManager[None]:
        return nullcontext()

    torch.cuda.Stream = torch.cuda.Event = _Stream  # type: ignore[assignment, misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args, **kwargs: stream  # type: ignore[assignment]
    torch.cuda.stream = enter  # type: ignore[assignment]
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign, assignment]


def _cuda_generator_is_the_cpu_generator() -> None:
    """Megatron's RNG tracker swaps the state of the CUDA generator; dropout on a CPU draws from the CPU's."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_state  # type: ignore[assignment]
    torch.cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)  # type: ignore[assignment]
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    # It warns each time that the CPU generator moves inside a CUDA fork, which here is the point.
    logging.getLogger(megatron_random.__name__).addFilter(lambda record: "CPU RNG state changed" not in record.msg)


def _counts_of_tokens_are_numpy() -> None:
    """The dispatcher of tokens asks for counts as numpy arrays, and gets them only where they come from a GPU."""
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    @functools.wraps(original)
    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
