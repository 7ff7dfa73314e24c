"""Building a model whose values come from another generation: what would give values to its weights is left out.

While another generation trains, each kernel takes 0.15 to 0.2 ms from it (see `warm_up`), and a model is built by up to
six a weight: its first value, its copy in DDP's buffer, two for its main weight, one for each moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ray_etc.megatron import compat

_aten = torch.ops.aten
_WRITES = {_aten.fill_.Scalar, _aten.zero_.default, _aten.normal_.default, _aten.uniform_.default}
_MAKES = {_aten.clone.default, _aten._to_copy.default, _aten.zeros_like.default}

Mark = Callable[[Iterable[torch.Tensor]], None]


@contextmanager
def values_unset(are_unset: bool) -> Iterator[Mark]:
    """Within, parameters and what is marked keep whatever their memory holds, and so does what is made from them.

    That is: they are not filled; copies, conversions and zeros in their shape are only allocated. Where not
    `are_unset`, everything is as usual. `write_zeros` comes afterwards.
    """
    if not are_unset:
        yield lambda tensors: None
        return
    with _ValuesUnset() as mode:
        yield mode.mark


@torch.no_grad()
def write_zeros(chunks: Sequence[torch.nn.Module], optimizer: MegatronOptimizer) -> None:
    """All weights, main weights and moments are zero, by few kernels.

    What no move overwrites must not be left as memory happens to be: the vocabulary's padding. And a step on NaN would
    spread them.
    """
    tensors = [param.data for chunk in chunks for param in chunk.parameters()]
    for leaf in compat.leaf_optimizers(optimizer):
        tensors += [tensor.detach() for *_, held in compat.owned_state(leaf) for tensor in held.values()]
    for dtype in {tensor.dtype for tensor in tensors}:
        torch._foreach_zero_([tensor for tensor in tensors if tensor.dtype == dtype])


class _ValuesUnset(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._unset: set[StorageWeakRef] = set()

    def mark(self, tensors: Iterable[torch.Tensor]) -> None:
        # Weak, so that memory is given back; and while there is a reference, no other storage gets its address.
        self._unset.update(StorageWeakRef(tensor.untyped_storage()) for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _WRITES and self._is_unset(args[0]):
            return args[0]
        if func is _aten.copy_.default and self._is_unset(args[1]):
            self.mark([args[0]])
            return args[0]
        if func in _MAKES and self._is_unset(args[0]):
            made = torch.empty_like(
                args[0], **{name: value for name, value in kwargs.items() if name != "non_blocking"}
            )
            self.mark([made])
            return made
        return func(*args, **kwargs)

    def _is_unset(self, tensor: torch.Tensor) -> bool:
        return isinstance(tensor, torch.nn.Parameter) or StorageWeakRef(tensor.untyped_storage()) in self._unset
