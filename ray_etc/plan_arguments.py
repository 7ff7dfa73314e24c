"""What `python -m ray_etc plan` is told on its command line: models and configurations, understood or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from ray_etc.planners.model import ModelShape
from ray_etc.planners.model_file import model_from_arguments
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.zoo import model_named

AXES = {
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "vpp": "virtual_pipeline",
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "plain": {"distributed_optimizer": False},
    "fsdp": {"fully_sharded": True},
}
"""How the state is spread over replicas: the optimizer's (ZeRO-1), nothing, or everything."""

PARSERS: dict[str, Callable[[str], Any]] = {".yaml": yaml.safe_load, ".yml": yaml.safe_load, ".json": json.loads}


def parse_parallel(flag: str, text: str) -> ParallelConfig:
    """`tp=8,pp=4,dp=32` as a configuration; ValueError, naming `flag`, for what is not understood or cannot be.

    Axes are those of AXES; `layers=7-8-8-7` gives the layers of each stage, and one of the words of OPTIMIZERS how the
    state is spread, ZeRO-1 where none is given.
    """
    given: dict[str, Any] = {}
    word = None
    for part in text.split(","):
        axis, equals, number = part.partition("=")
        if not equals and axis in OPTIMIZERS:
            if word is not None:
                raise ValueError(f"{flag} {text}: {word} and {axis} exclude each other")
            word = axis
            continue
        name = "pipeline_layers" if axis == "layers" else AXES.get(axis)
        if name is None:
            known = f"{', '.join(AXES)} or layers, nor the word {' or '.join(OPTIMIZERS)}"
            raise ValueError(f"{flag} {text}: {axis!r} is not one of {known}")
        if name in given:
            raise ValueError(f"{flag} {text}: {axis} is given twice")
        if axis == "layers":
            given[name] = _layers(flag, text, number)
        elif not number.isdecimal() or not int(number):
            raise ValueError(f"{flag} {text}: {axis}={number} must be a whole number of at least 1")
        else:
            given[name] = int(number)
    try:
        return ParallelConfig(**given, **OPTIMIZERS[word or "zero1"])
    except ValueError as error:
        raise ValueError(f"{flag} {text}: {error}") from None


def _layers(flag: str, text: str, numbers: str) -> tuple[int, ...]:
    if not all(number.isdecimal() for number in numbers.split("-")):
        raise ValueError(f"{flag} {text}: layers={numbers} is not like layers=7-8-8-7, one number a stage")
    return tuple(int(number) for number in numbers.split("-"))


def load_model(text: str) -> ModelShape:
    """The model of the zoo called `text`, or the one of a .yaml or .json file of Megatron's argument names.

    Raises ValueError, naming the file, where it cannot be read or does not say what the model is.
    """
    path = Path(text)
    parse = PARSERS.get(path.suffix)
    if parse is None:
        return model_named(text)
    try:
        arguments = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--model {text}: {error.strerror}") from None
    except (ValueError, yaml.YAMLError) as error:
        raise ValueError(f"--model {text}: {' '.join(str(error).split())}") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"--model {text} must be a mapping of Megatron's argument names, such as hidden_size: 4096")
    try:
        return model_from_arguments(arguments)
    except ValueError as error:
        raise ValueError(f"--model {text}: {error}") from None


def check_room(parallel: ParallelConfig, nodes: int, node_size: int) -> None:
    """Raise ValueError, with the numbers, where the ranks do not fit on `nodes` nodes of `node_size` GPUs.

    Each tensor-parallel group, of experts too, must fit into a node.
    """
    for axis, size in (("tp", parallel.tensor_parallel), ("etp", parallel.tensor_parallel_of_experts)):
        if size > node_size:
            raise ValueError(f"{axis}={size} does not fit on a node of {node_size} GPUs; use {axis}<={node_size}")
    slots = nodes * node_size
    if parallel.world_size > slots:
        axes = [("tp", parallel.tensor_parallel), ("cp", parallel.context_parallel), ("pp", parallel.pipeline_parallel)]
        sizes = " x ".join(f"{axis}={size}" for axis, size in axes if axis != "cp" or size > 1)
        per_replica = parallel.world_size // parallel.data_parallel
        enough = f"enough for dp<={slots // per_replica}" if slots >= per_replica else "too few for one replica"
        raise ValueError(
            f"{sizes} x dp={parallel.data_parallel} = {parallel.world_size} ranks need as many GPUs; "
            f"{nodes}x{node_size} are {slots}, {enough}"
        )
