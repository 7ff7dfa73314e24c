"""A stand-in for Transformer Engine's FusedAdam, which is not to be had here: its interface, in plain torch.

It is what Megatron's precision-aware optimizer asks for: moments in fp32 or bf16, main weights of its own, whole or as
the 16 bits that they have more than their bf16 weights, the step count in the parameter groups, and a load that makes
new tensors. Scaled formats (fp16, 8 bits) are left out: ray_etc refuses them.

Not yet run with Transformer Engine itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import megatron.core.optimizer
import torch
from megatron.core import utils
from megatron.core.optimizer import distrib_optimizer
from packaging.version import Version

NAMES = ("exp_avg", "exp_avg_sq", "master_param")


def join(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 main weight of a bf16 weight, which is rounded by the first of the 16 bits that it lacks."""
    upper = weight.view(torch.int16).int() - (remainder < 0).int()
    return (upper << 16 | remainder.int() & 0xFFFF).view(torch.float32)


def split(main: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The other way round: weight and remainder."""
    bits = main.contiguous().view(torch.int32)
    remainder = (bits & 0xFFFF).to(torch.int16)
    return ((bits >> 16) + (remainder < 0).int()).to(torch.int16).view(torch.bfloat16), remainder


class FusedAdam(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "bias_correction": bias_correction})
        assert adam_w_mode
        assert not capturable
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self._dtypes = dict(zip(NAMES, (exp_avg_dtype, exp_avg_sq_dtype, master_weight_dtype), strict=True))
        self.store_param_remainders = store_param_remainders and master_weights

    def _keeps_remainder(self, param: torch.Tensor) -> bool:
        return self.store_param_remainders and param.dtype == torch.bfloat16

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for name in NAMES if self.master_weights else NAMES[:2]:
            self._make(param, name, store_param_remainders)
        if self.master_weights and not store_param_remainders:
            self.set_scaled_state(param, "master_param", param.detach().float())

    def _make(self, param: torch.Tensor, name: str, as_remainder: bool) -> None:
        dtype = torch.int16 if as_remainder and name == "master_param" else self._dtypes[name]
        self.state[param][name] = torch.zeros_like(param, dtype=dtype)

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        """What is there if it is fp32 or a remainder, and else a copy."""
        held = self.state[param][name]
        return held if held.dtype in (torch.float32, torch.int16) else held.float()

    def set_scaled_state(self, param: torch.Tensor, name: str, value: torch.Tensor) -> None:
        as_remainder = self._keeps_remainder(param) and name == "master_param"
        assert value.dtype == (torch.int16 if as_remainder else torch.float32)
        if name not in self.state[param]:
            self._make(param, name, as_remainder)
        self.state[param][name].copy_(value)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        params = dict(enumerate(param for group in self.param_groups for param in group["params"]))
        found["state"] = {
            number: {name: self.get_unscaled_state(params[number], name) for name in held}
            for number, held in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        params = dict(enumerate(param for group in self.param_groups for param in group["params"]))
        for number, held in state_dict["state"].items():
            self.state[params[number]] = {}
            for name, value in held.items():
                self.set_scaled_state(params[number], name, value)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if not self.state[param]:
                    self.initialize_state(param, self._keeps_remainder(param))
                grad = getattr(param, "decoupled_grad", None) if self.use_decoupled_grad else param.grad
                if grad is not None:
                    self._update(param, grad.float(), group)

    def _update(self, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[param], group["betas"]
        first = self.get_unscaled_state(param, "exp_avg").lerp(grad, 1 - beta1)
        second = self.get_unscaled_state(param, "exp_avg_sq").lerp(grad.square(), 1 - beta2)
        if self._keeps_remainder(param):
            main = join(param, state["master_param"])
        elif self.master_weights and param.dtype != torch.float32:
            main = state["master_param"]
        else:  # an fp32 weight is its own main weight, even if there is another
            main = param.float()
        m, v = first / (1 - beta1 ** group["step"]), second / (1 - beta2 ** group["step"])
        main = main - group["lr"] * (m / (v.sqrt() + group["eps"]) + group["weight_decay"] * main)
        if self._keeps_remainder(param):
            weight, remainder = split(main)
            param.copy_(weight)
            state["master_param"].copy_(remainder)
        else:
            param.copy_(main)
            if self.master_weights and param.dtype != torch.float32:
                state["master_param"].copy_(main)
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)


@contextmanager
def in_place_of_transformer_engine(is_asked_for: bool) -> Iterator[None]:
    """Around the making of an optimizer. Megatron's distributed optimizer takes the stand-in for the real one for good,
    so this is for processes of their own."""
    if not is_asked_for:
        yield
        return
    module: Any = ModuleType("transformer_engine.pytorch.optimizers")
    module.FusedAdam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_TE_OPTIMIZER = True
    parents = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    with (
        patch.dict(sys.modules, {**parents, module.__name__: module}),
        patch.object(utils, "get_te_version", lambda: Version("2.8")),
        patch.object(megatron.core.optimizer, "Adam", FusedAdam),
        patch.object(megatron.core.optimizer, "USING_PYTORCH_OPTIMIZER", False),
    ):
        yield
