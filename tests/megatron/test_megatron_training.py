"""Every configuration trains, and trains the same model."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from logical import Logical, load, read, whole
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.transformer_layer import TransformerLayer
from ranks import run_ranks
from tiny import ONE, build, parallel

from ray_etc.actors.context import Context
from ray_etc.actors.session import open_session
from ray_etc.actors.small_state import SmallState
from ray_etc.megatron import GPTConfig, Task
from ray_etc.megatron.compat import leaf_optimizers
from ray_etc.planners.parallel import ParallelConfig

CONFIGURATIONS = [
    parallel(),
    parallel(tp=2, sp=True),
    parallel(tp=4),
    parallel(pp=4, zero=False),
    parallel(dp=2, zero=False),
    parallel(dp=4),
    parallel(tp=2, dp=2, sp=True),
    parallel(tp=2, pp=2),
]
MORE = [
    parallel(zero=False),
    parallel(tp=2),
    parallel(tp=2, zero=False),
    parallel(pp=2),
    parallel(dp=2),
    parallel(tp=2, dp=2, zero=False),
    parallel(pp=2, dp=2),
    parallel(pp=2, dp=2, zero=False),
]


def train(config: ParallelConfig, steps: int, start: tuple[Logical, dict] | None = None, **model: Any) -> dict:
    """Train from the start, or, as a later generation does, from the logical state of another configuration."""
    if start is not None:
        rank = dist.get_rank()
        open_session(Context("test", 1, config, rank, rank, config.world_size, 0, rank))
    task = build(config, **model)
    if start is not None:
        load(task.state, *start)
    reports = [task.train_step() for _ in range(steps)]
    return {"reports": reports, "shards": read(task.state), "small": task.state.small_state()}


def continued(**model: Any) -> tuple[tuple[Logical, dict], list[dict]]:
    """The state after two steps on one rank, and the reports of the next two."""
    (first,) = run_ranks(train, 1, ONE, 2, None, **model)
    start = whole([first["shards"]]), first["small"]
    (rest,) = run_ranks(train, 1, ONE, 2, start, **model)
    return start, rest["reports"]


@pytest.fixture(scope="module", params=[False, True], ids=["fp32", "bf16"])
def reference(request: pytest.FixtureRequest) -> tuple[bool, tuple[Logical, dict], list[dict]]:
    return request.param, *continued(bf16=request.param)


@pytest.mark.parametrize(
    "config", [*CONFIGURATIONS, *(pytest.param(each, marks=pytest.mark.slow) for each in MORE)], ids=str
)
def test_every_configuration_continues_one_run(config: ParallelConfig, reference: Any) -> None:
    bf16, start, expected = reference
    ranks = run_ranks(train, config.world_size, config, 2, start, bf16=bf16)
    for step, report in enumerate(expected):
        losses = {rank["reports"][step]["loss"] for rank in ranks}
        assert len(losses) == 1, "the loss is not the same number on every rank"
        assert losses.pop() == pytest.approx(report["loss"], abs=5e-3 if bf16 else 1e-5)
        for rank in ranks:
            assert rank["reports"][step]["lr"] == report["lr"]
            assert rank["reports"][step]["tokens"] == report["tokens"] == 8 * 16
            assert rank["reports"][step]["grad_norm"] == pytest.approx(report["grad_norm"], rel=2e-2 if bf16 else 1e-4)
    whole([rank["shards"] for rank in ranks])


def test_dp2_starts_like_tp1() -> None:
    (one,) = run_ranks(train, 1, ONE, 1)
    two = run_ranks(train, 2, parallel(dp=2), 1)
    assert two[0]["reports"][0]["loss"] == pytest.approx(one["reports"][0]["loss"], abs=1e-6)


def test_zero_only_changes_where_the_optimizer_works() -> None:
    sharded = run_ranks(train, 2, parallel(dp=2), 3)
    plain = run_ranks(train, 2, parallel(dp=2, zero=False), 3)
    assert [r["loss"] for r in sharded[0]["reports"]] == pytest.approx([r["loss"] for r in plain[0]["reports"]])


def test_same_seed_same_run() -> None:
    first, second = (run_ranks(train, 2, parallel(tp=2), 2) for _ in range(2))
    assert [r["loss"] for r in first[0]["reports"]] == [r["loss"] for r in second[0]["reports"]]
    (other,) = run_ranks(lambda: build(ONE, seed=8).train_step()["loss"], 1)
    (this,) = run_ranks(lambda: build(ONE, seed=7).train_step()["loss"], 1)
    assert other != this


@pytest.mark.parametrize("zero", [True, False], ids=["zero", "plain"])
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_moments_made_early_change_nothing(zero: bool, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam makes its moments in its first step; the state needs them before it."""
    build_module = sys.modules["ray_etc.megatron.build"]

    def losses_and_weights() -> tuple[list[float], list[torch.Tensor]]:
        task = build(parallel(zero=zero), bf16=bf16)
        losses = [task.train_step()["loss"] for _ in range(3)]
        return losses, [param.detach().clone() for param in task.chunks[0].parameters()]

    (early,) = run_ranks(losses_and_weights, 1)
    monkeypatch.setattr(build_module, "state", lambda *args, **kwargs: None)
    (late,) = run_ranks(losses_and_weights, 1)
    assert early[0] == late[0]
    assert all(torch.equal(a, b) for a, b in zip(early[1], late[1], strict=True))


@pytest.mark.parametrize("padded", [260, 300])
def test_padding_of_the_vocabulary_changes_nothing(padded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    start, expected = continued()
    monkeypatch.setattr(GPTConfig, "padded_vocab_size", lambda self, tensor_parallel: padded)

    def train_and_look(config: ParallelConfig) -> tuple[list[float], float]:
        task = build(config)
        load(task.state, *start)
        losses = [task.train_step()["loss"] for _ in range(2)]
        module = task.chunks[0].module
        rows = [module.embedding.word_embeddings.weight[257:], module.output_layer.weight[257:]]
        return losses, max(float(row.detach().abs().max()) for row in rows)

    ((losses, largest),) = run_ranks(train_and_look, 1, ONE)
    assert losses == pytest.approx([report["loss"] for report in expected], abs=1e-6)
    assert largest == 0.0


def test_tied_embeddings_over_a_pipeline() -> None:
    start, expected = continued(tied_embeddings=True)
    ranks = run_ranks(train, 2, parallel(pp=2), 2, start, tied_embeddings=True)
    assert [r["loss"] for r in ranks[0]["reports"]] == pytest.approx([r["loss"] for r in expected], abs=1e-5)
    names = {spec.name for spec, _, _ in ranks[1]["shards"]}
    assert "embedding.word_embeddings.weight" in names
    assert "output_layer.weight" not in names


def test_only_the_first_generation_initialises() -> None:
    def weights(generation: int | None) -> torch.Tensor:
        if generation is not None:
            open_session(Context("test", generation, ONE, 0, 0, 1, 0, 0))
        return build(ONE).chunks[0].module.output_layer.weight.detach().clone()

    ((alone,), (first,), (second,)) = (run_ranks(weights, 1, generation) for generation in (None, 0, 1))
    assert torch.equal(alone, first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("config", [parallel(dp=2), parallel(tp=2), parallel(pp=2, zero=False)], ids=str)
def test_warm_up_step_leaves_no_trace(config: ParallelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """But zeros in the tensors that are to be overwritten; the vocabulary's padding, too, which nothing overwrites."""
    build_module = sys.modules["ray_etc.megatron.build"]

    def look() -> dict[str, Any]:
        rank = dist.get_rank()
        open_session(Context("test", 1, config, rank, rank, config.world_size, 0, rank, about_step=3))
        torch.use_deterministic_algorithms(True)  # unset memory is NaN
        task = build(config, dropout=0.1, bf16=True, vocab_size=257)
        (model,) = task.chunks
        buffers = [*model.buffers, *model.expert_parallel_buffers]
        states = [state for leaf in leaf_optimizers(task.optimizer) for state in leaf.optimizer.state.values()]
        return {
            "small": SmallState.of(task.state),
            "microbatches": get_num_microbatches(),
            "lr": [group["lr"] for group in task.optimizer.param_groups],
            "gradients": max(float(buffer.grad_data.abs().max()) for buffer in buffers),
            "weights": max(float(param.abs().max()) for param in model.parameters()),
            "moments": max(
                float(moments[kind].abs().max()) for moments in states for kind in ("exp_avg", "exp_avg_sq")
            ),
        }

    warm = run_ranks(look, 2)
    monkeypatch.setattr(build_module, "warm_up", lambda *args: None)
    cold = run_ranks(look, 2)
    for a, b in zip(warm, cold, strict=True):
        assert a["small"].digests() == b["small"].digests()
        streams = [SmallState(each["small"].streams, b"").digests() for each in (a, b)]
        assert streams[0] == streams[1]
        assert (a["microbatches"], a["lr"]) == (b["microbatches"], b["lr"])
        assert a["gradients"] == a["weights"] == a["moments"] == 0.0


def test_warm_up_step_runs_through_one_layer_of_each_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ParallelConfig(pipeline_parallel=2, virtual_pipeline=2)
    ran: list[int] = []
    train_on = Task.train_on

    def counted(task: Task, micro_batch_count: int) -> dict[str, Any]:
        for chunk in task.chunks:
            for part in chunk.modules():
                if isinstance(part, TransformerLayer):
                    part.register_forward_hook(lambda layer, *_: ran.append(layer.layer_number))
        return train_on(task, micro_batch_count)

    def look() -> tuple[list[int], list[int]]:
        rank = dist.get_rank()
        open_session(Context("test", 1, config, rank, rank, config.world_size, 0, rank, about_step=3))
        task = build(config, num_layers=8)
        warm = sorted(set(ran))
        ran.clear()
        task.train_step()
        return warm, sorted(set(ran))

    monkeypatch.setattr(Task, "train_on", counted)
    assert run_ranks(look, 2) == [([1, 5], [1, 2, 5, 6]), ([3, 7], [3, 4, 7, 8])]


def test_build_says_what_is_wrong() -> None:
    def messages() -> list[str]:
        said = []
        for config in (parallel(dp=2), parallel(tp=3)):
            try:
                build(config)
            except ValueError as error:
                said.append(str(error))
        return said

    (said,) = run_ranks(messages, 1)
    assert said == [
        "TP1 PP1 DP2 ZeRO-1 needs 2 ranks; there are 1",
        "num_attention_heads=4 cannot be split by tensor_parallel=3; use 1, 2 or 4",
    ]
