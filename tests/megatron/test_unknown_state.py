"""State that the catalogue does not know of is refused where the state is made: it would be lost in a resize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from matrix import PLAIN, mesh
from megatron.core.optimizer import get_megatron_optimizer
from ranks import run_ranks
from trainee import trainee

import ray_etc.megatron


def said(change: Callable[[Any], None]) -> str:
    """What the state of a model that was changed so is refused with; nothing where it is made."""

    def make() -> str:
        task = trainee("experts, biased router", {}, 4)(mesh(**PLAIN))
        change(task)
        try:
            ray_etc.megatron.state(task.chunks, task.optimizer, vocab_size=task.config.vocab_size)
        except ValueError as error:
            return str(error)
        return ""

    [answer] = run_ranks(make, 1)
    return answer


def module_of(task: Any) -> Any:
    return task.chunks[0].module


class Signs(torch.optim.SGD):
    """A user's own: Megatron would take it in place of the one that it made."""


def test_an_optimizer_that_may_keep_other_tensors() -> None:
    def change(task: Any) -> None:
        [leaf] = task.optimizer.chained_optimizers
        leaf.optimizer = Signs(leaf.optimizer.param_groups, lr=0.1)

    assert said(change).startswith("cannot find the state of a Signs; it is known of Adam,")


def test_a_model_of_which_every_weight_is_frozen() -> None:
    def change(task: Any) -> None:
        task.chunks[0].requires_grad_(False)
        task.optimizer = get_megatron_optimizer(task.optimizer.config, task.chunks)

    assert said(change) == "the optimizer has nothing to update: every weight is frozen; leave one trainable"


@pytest.mark.parametrize("name", ["fp8", "fp4"])
def test_weights_with_scales_which_are_made_in_the_first_step_only(name: str) -> None:
    def change(task: Any) -> None:
        setattr(module_of(task).config, name, "some")

    assert said(change).startswith(f"{name}='some': scales and amax histories of Transformer Engine cannot be moved")


def with_extra_state(data: Any) -> Callable[[Any], None]:
    def change(task: Any) -> None:
        norm = module_of(task).decoder.final_layernorm
        extra = {"get_extra_state": lambda self: data, "set_extra_state": lambda self, state: None}
        norm.__class__ = type("WithExtraState", (type(norm),), extra)

    return change


def test_bytes_of_transformer_engine() -> None:
    """Its `_extra_state`, which is empty where nothing is in 8 bits."""
    assert "extra_state is opaque state" in said(with_extra_state(torch.zeros(3, dtype=torch.uint8)))
    assert said(with_extra_state(torch.zeros(0, dtype=torch.uint8))) == ""


@pytest.mark.parametrize("name", ["router.weight", "router.expert_bias"])
def test_a_tensor_that_the_model_itself_does_not_name(name: str) -> None:
    def change(task: Any) -> None:
        layer = module_of(task).decoder.layers[0].mlp
        original = layer.sharded_state_dict

        def forgetful(*args: Any, **kwargs: Any) -> Any:
            return {key: value for key, value in original(*args, **kwargs).items() if not key.endswith(name)}

        layer.sharded_state_dict = forgetful

    assert f"does not say where all of decoder.layers.0.mlp.{name} belongs" in said(change)


def test_nothing_is_refused_that_was_not_changed() -> None:
    assert said(lambda task: None) == ""
