"""The resizes of `benchmarks.handover`, by the number of slots that they are for: one GPU each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from benchmarks.handover_driver import Case
from ray_etc.planners.model import ExpertShape
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.zoo import ZOO, ModelShape

TINY = ModelShape(4, 64, 128, 8, 8, 128, kv_channels=8)
TINY_EXPERTS = replace(TINY, experts=ExpertShape(16, 32))


def cases_for(slots: int, model_named: Callable[[str], ModelShape]) -> list[Case]:
    """Those that hold the old state beside the new one on GPUs of 141 GB; half of the layers where it would not fit.

    Raises:
        ValueError: there are none for so many slots.
    """
    makers = {2: _two, 4: _four, 8: _eight}
    if slots not in makers:
        raise ValueError(f"there are cases for {', '.join(map(str, makers))} slots, not for {slots}")
    return [replace(case, trains=True) for case in makers[slots](model_named)]


def model_for(name: str, layers: int | None, is_tiny: bool) -> ModelShape:
    """A model of the zoo, cut to so many layers; or a tiny one of its family."""
    if is_tiny:
        return TINY if ZOO[name].experts is None else TINY_EXPERTS
    return ZOO[name] if layers is None else replace(ZOO[name], num_layers=min(layers, ZOO[name].num_layers))


def mesh(tp: int = 1, pp: int = 1, dp: int = 1, zero: bool = True, ep: int = 1) -> ParallelConfig:
    return ParallelConfig(tp, pp, dp, distributed_optimizer=zero, expert_parallel=ep)


def half(model: ModelShape) -> ModelShape:
    return replace(model, num_layers=model.num_layers // 2)


def _two(model_named: Callable[[str], ModelShape]) -> list[Case]:
    model = model_named("llama2-7b")
    return [
        Case("tp1_dp2_to_tp2.distributed", model, mesh(dp=2), mesh(tp=2)),
        Case("tp1_dp2_to_tp2.plain", model, mesh(dp=2, zero=False), mesh(tp=2, zero=False)),
        Case("tp2_to_pp2", model, mesh(tp=2, zero=False), mesh(pp=2, zero=False)),
        Case("pp2_to_tp1_dp2.distributed", model, mesh(pp=2), mesh(dp=2)),
        Case("pp2_to_tp1_dp2.plain", model, mesh(pp=2, zero=False), mesh(dp=2, zero=False)),
        Case("2_to_1_gpus.tp2_to_tp1", model, mesh(tp=2, zero=False), mesh(zero=False)),
        Case("1_to_2_gpus.tp1_to_tp2", model, mesh(zero=False), mesh(tp=2, zero=False)),
        Case("2_to_1_gpus.dp2_half_depth.distributed", half(model), mesh(dp=2), mesh()),
        Case("1_to_2_gpus.dp2_half_depth.distributed", half(model), mesh(), mesh(dp=2)),
        Case("1_to_2_gpus.dp2_half_depth.plain", half(model), mesh(zero=False), mesh(dp=2, zero=False)),
    ]


def _four(model_named: Callable[[str], ModelShape]) -> list[Case]:
    model, larger = model_named("llama2-7b"), model_named("llama2-13b")
    return [
        Case("7b.tp4_to_tp2_dp2", model, mesh(tp=4), mesh(tp=2, dp=2)),
        Case("7b.tp2_pp2_to_dp4", model, mesh(tp=2, pp=2), mesh(dp=4)),
        Case("7b.dp4_to_tp2_pp2", model, mesh(dp=4), mesh(tp=2, pp=2)),
        Case("7b.tp2_dp2_to_tp4", model, mesh(tp=2, dp=2), mesh(tp=4)),
        Case("7b.4_to_2_gpus.dp", model, mesh(dp=4), mesh(dp=2)),
        Case("7b.2_to_4_gpus.dp", model, mesh(dp=2), mesh(dp=4)),
        Case("7b.4_to_2_gpus.tp", model, mesh(tp=4), mesh(tp=2)),
        Case("7b.2_to_4_gpus.tp", model, mesh(tp=2), mesh(tp=4)),
        Case("7b.dp4_to_dp3", model, mesh(dp=4), mesh(dp=3)),
        *_fan_out(model, 4),
        Case("13b.tp4_to_tp2_dp2", larger, mesh(tp=4), mesh(tp=2, dp=2)),
        Case("13b.tp2_dp2_to_tp2_pp2", larger, mesh(tp=2, dp=2), mesh(tp=2, pp=2)),
    ]


def _eight(model_named: Callable[[str], ModelShape]) -> list[Case]:
    model, larger, experts = map(model_named, ("llama2-7b", "llama2-13b", "qwen3-30b-a3b"))
    return [
        Case("7b.tp8_to_tp4_dp2", model, mesh(tp=8), mesh(tp=4, dp=2)),
        Case("7b.tp4_pp2_to_dp8", model, mesh(tp=4, pp=2), mesh(dp=8)),
        Case("7b.dp8_to_tp2_pp2_dp2", model, mesh(dp=8), mesh(tp=2, pp=2, dp=2)),
        Case("7b.tp4_dp2_to_tp8", model, mesh(tp=4, dp=2), mesh(tp=8)),
        Case("7b.8_to_4_gpus.dp", model, mesh(dp=8), mesh(dp=4)),
        Case("7b.4_to_8_gpus.dp", model, mesh(dp=4), mesh(dp=8)),
        Case("7b.8_to_4_gpus.tp", model, mesh(tp=8), mesh(tp=4)),
        Case("7b.4_to_8_gpus.tp", model, mesh(tp=4), mesh(tp=8)),
        Case("7b.dp8_to_dp7", model, mesh(dp=8), mesh(dp=7)),
        *_fan_out(model, 8),
        Case("13b.tp8_to_tp2_dp4", larger, mesh(tp=8), mesh(tp=2, dp=4)),
        Case("13b.tp2_dp4_to_tp4_pp2", larger, mesh(tp=2, dp=4), mesh(tp=4, pp=2)),
        Case("experts.ep8_to_tp2_ep4", experts, mesh(dp=8, ep=8), mesh(tp=2, dp=4, ep=4)),
        Case("experts.tp2_ep4_to_ep8", experts, mesh(tp=2, dp=4, ep=4), mesh(dp=8, ep=8)),
    ]


def _fan_out(model: ModelShape, slots: int) -> list[Case]:
    """One replica to all slots, and to two of them, of a state that is whole in each."""
    one = mesh(zero=False)
    return [
        Case(f"7b.fan_out_1_to_{many}_half_depth", half(model), one, mesh(dp=many, zero=False)) for many in (2, slots)
    ]
