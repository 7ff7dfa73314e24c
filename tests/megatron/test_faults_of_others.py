"""Faults that others have had in resuming and resharding, each as a test with the right value.

Some are tested elsewhere. Rows of matrix.py: four stages to four expert ranks; unlike numbers of experts on the ranks;
chained optimizers over stages; more model chunks than one; another layout of layers. test_megatron_streams.py: the
streams of all coordinates, and those of a new tensor-parallel rank. test_resized_runs.py: each sample once.
test_batch_ramp.py: a global batch that goes its own way.
tests/actors/test_session.py and tests/gpu/test_boundary.py: a copy that begins before the optimizer has ended.
"""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from host import spoil
from logical import RankShards, read, whole
from matrix import BF16, MOMENTS, WHOLE_MAINS, Row, mesh
from ranks import run_ranks
from resize import Generation, hand_over, slots_for, start_next
from trainee import trainee

import ray_etc.megatron
from ray_etc.megatron import checkpoint, compat
from ray_etc.planners.errors import StateMissing
from ray_etc.planners.migrate import make_plan
from ray_etc.planners.parallel import ParallelConfig


def random_streams(parallel: ParallelConfig, streams: dict[Any, Any] | None) -> dict[str, Any]:
    """What each of the tracker's streams gives next, on one rank."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    task = trainee("experts", {}, 8)(parallel)
    random = task.state.streams["random"]
    if streams is None:
        task.train_step()
        for name in get_cuda_rng_tracker().get_states():  # no dropout, so that nothing has drawn yet
            with get_cuda_rng_tracker().fork(name):
                torch.rand(1 + torch.distributed.get_rank())
    else:
        random.load_streams(streams, parallel.coordinate(torch.distributed.get_rank()), 1)
    states = random.state_dict()
    drawn = {}
    for name in get_cuda_rng_tracker().get_states():
        with get_cuda_rng_tracker().fork(name):
            drawn[name] = torch.rand(2).tolist()
    return {"states": states, "drawn": drawn}


def go_on(old: ParallelConfig, new: ParallelConfig) -> tuple[dict[Any, Any], dict[Any, Any]]:
    """What the streams of each coordinate of both generations give next."""
    before = run_ranks(random_streams, old.world_size, old, None)
    held = {old.coordinate(rank): each["states"] for rank, each in enumerate(before)}
    after = run_ranks(random_streams, new.world_size, new, held)
    return (
        {old.coordinate(rank): each["drawn"] for rank, each in enumerate(before)},
        {new.coordinate(rank): each["drawn"] for rank, each in enumerate(after)},
    )


def test_each_place_among_the_experts_goes_on_with_its_own_stream() -> None:
    """Others: after a resume with EP above 1, nearly every rank had another rank's."""
    old, new = mesh(tp=2, ep=2, etp=1), mesh(dp=2, ep=2)
    before, after = go_on(old, new)
    experts = {at.expert: drawn["expert-parallel-rng"] for at, drawn in before.items()}
    assert experts[0] != experts[1]
    assert {at.expert: drawn["expert-parallel-rng"] for at, drawn in after.items()} == experts
    # The other streams of both come from the one old rank of their tensor index.
    assert {tuple(drawn["model-parallel-rng"]) for drawn in after.values()} == {
        tuple(drawn["model-parallel-rng"]) for at, drawn in before.items() if at.tensor == 0
    }


def test_context_parallel_ranks_go_on_with_their_own_streams() -> None:
    """Others: the tracker that draws dropout was wrong under context parallelism after a load."""
    before, after = go_on(mesh(cp=2), mesh(cp=2))
    assert after == before
    before, after = go_on(mesh(cp=2), mesh(cp=2, dp=2))
    assert [drawn for at, drawn in after.items() if at.data < 2] == list(before.values())


def test_missing_state_is_fatal() -> None:
    """Others: moments were dropped without a word, and training went on."""

    def layout() -> Any:
        return trainee("llama", BF16, 8)(mesh()).state.layout()

    (held,) = run_ranks(layout, 1)
    lost = tuple(shard for shard in held if shard.tensor.kind != "exp_avg")
    with pytest.raises(StateMissing, match="exp_avg"):
        make_plan({0: lost}, {0: held}, {0: "a"})


def test_shapes_decide_where_a_mark_of_tensor_parallelism_is_missing() -> None:
    """Others: grouped experts lacked the mark, so 128 met 64."""

    def boxes(is_marked: bool) -> set[tuple[Any, ...]]:
        task = trainee("experts", {}, 8)(mesh(tp=2))
        if not is_marked:
            for param in task.chunks[0].parameters():
                param.tensor_model_parallel = False
        state = ray_etc.megatron.state(task.chunks, task.optimizer, vocab_size=task.config.vocab_size)
        return {(shard.tensor.key, shard.tensor.shape, shard.box) for shard in state.shards}

    marked, unmarked = run_ranks(boxes, 2, True), run_ranks(boxes, 2, False)
    assert unmarked == marked
    halves = [{box.lengths for (_, name), _, box in rank if name.endswith("linear_fc1.weight_w")} for rank in marked]
    assert halves == [{(1, 6, 16)}] * 2


def test_gate_and_up_of_swiglu_are_cut_apart() -> None:
    """Others: split as one tensor, which gives plausible numbers and a destroyed model."""

    def gates(parallel: ParallelConfig) -> tuple[RankShards, torch.Tensor, torch.Tensor]:
        task = trainee("llama", {}, 8)(parallel)
        gate, up = task.chunks[0].module.decoder.layers[0].mlp.linear_fc1.weight.detach().chunk(2)
        return read(task.state), gate, up

    ranks: list[tuple[RankShards, torch.Tensor, torch.Tensor]] = run_ranks(gates, 2, mesh(tp=2))
    tensors = whole([shards for shards, _, _ in ranks])
    name = "decoder.layers.0.mlp.linear_fc1.weight_"
    assert torch.equal(tensors["param", name + "w"], torch.cat([gate for _, gate, _ in ranks]))
    assert torch.equal(tensors["param", name + "v"], torch.cat([up for _, _, up in ranks]))


def test_padding_of_the_vocabulary_is_made_anew_and_never_moved() -> None:
    """Others: it was applied twice, or moved as if it were words."""
    row = Row("llama", mesh(tp=4), mesh(tp=2), change={"vocab_size": 5})
    with moved(row) as new:
        words = new.ask("look", word_embeddings)
    assert [weight.shape[0] for weight in words] == [3, 3]
    assert not words[1][2].any()
    assert all(bool(weight.any()) for weight in (*words[0], *words[1][:2]))


def word_embeddings(task: Any) -> torch.Tensor:
    return task.chunks[0].module.embedding.word_embeddings.weight.detach()


def adam_step(task: Any) -> int:
    return task.state.replicated["optimizer"].state_dict()["step"]


def loss_scales(task: Any) -> dict[bool, dict[str, Any]]:
    return task.state.replicated["optimizer"].state_dict()["grad_scalers"]


def process_groups(_: Any) -> tuple[int, int]:
    """Those that torch knows of, and open sockets: that of a handover is made without its knowing."""
    gc.collect()
    sockets = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_socket()]
    return len(torch.distributed.distributed_c10d._world.pg_map), len(sockets)


def moved(row: Row) -> Generation:
    """The new generation after a handover of `row`; the old one is gone."""
    build = trainee(row.model, row.optimizer, row.batch_size, **row.change)
    old_slots = range(row.old.world_size)
    new_slots = slots_for(old_slots, row.new.world_size)
    with Generation(0, row.old, old_slots, build).enter() as old:
        old.ask("train", 2)
        new = start_next(old, row.new, new_slots, build)
        hand_over(old, new, new_slots).check()
    return new


def test_a_rank_that_owns_no_element_counts_steps_like_the_others() -> None:
    """Others: many ranks got empty shards, and uneven ones made the loss worse.

    Here each holds as much as its optimizer's range, down to nothing.
    """
    few = {
        "hidden_size": 4,
        "num_attention_heads": 2,
        "num_query_groups": 1,
        "ffn_hidden_size": 2,
        "num_layers": 1,
        "vocab_size": 2,
    }
    row = Row("llama", mesh(dp=2), mesh(dp=6), change=few)
    build = trainee(row.model, row.optimizer, row.batch_size, **row.change)
    with Generation(0, row.old, range(2), build).enter() as old:
        old.ask("train", 2)
        with start_next(old, row.new, range(6), build) as new:
            hand_over(old, new, range(6)).check()
            owned = [
                sum(view.numel() for spec, _, view in rank if spec.kind == "exp_avg") for rank in new.ask("shards")
            ]
            assert min(owned) == 0 < max(owned)
            assert new.ask("look", adam_step) == [2] * 6
            for _ in range(2):
                assert loss(new.ask("train", 1)) == pytest.approx(loss(old.ask("train", 1)), abs=1e-6)
            new.digests()  # fails where ranks differ
            assert new.ask("look", adam_step) == [4] * 6


def test_loss_scale_and_its_counters_go_on() -> None:
    """Three updates that overflow halve the scale; the next generation goes on from there."""
    scale = {"dtype": torch.float16, "initial_loss_scale": 2.0**38, "hysteresis": 2, "loss_scale_window": 3}
    row = Row("experts", mesh(dp=2, ep=2), mesh(dp=2), scale)
    build = trainee(row.model, row.optimizer, row.batch_size)
    with Generation(0, row.old, range(2), build).enter() as old:
        old.ask("train", 4)
        before = old.ask("look", loss_scales)
        with start_next(old, row.new, range(2), build) as new:
            hand_over(old, new, range(2)).check()
            after = new.ask("look", loss_scales)
    assert before[0][False]["scale"] < 2.0**38
    assert before == after


def working_and_main_weights(task: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the optimizer updates on this rank, and of what it is the rounded value. All of it is what is catalogued."""
    (leaf,) = compat.leaf_optimizers(task.optimizer)
    catalogued = {view.untyped_storage().data_ptr() for view in task.state.views()}
    pairs = []
    for group in leaf.optimizer.param_groups:
        for param in group["params"]:
            held = leaf.optimizer.state[param]
            assert [held[name].dtype for name in ("exp_avg", "exp_avg_sq")] == [torch.bfloat16] * 2
            assert {value.untyped_storage().data_ptr() for value in (param, *held.values())} <= catalogued
            pairs.append((param.detach().clone(), held["master_param"].clone()))
    return pairs


def save(task: Any, folder: Path) -> None:
    task.state.save_checkpoint(folder, 2)


def load(task: Any, folder: Path) -> None:
    for view in task.state.views():
        spoil(view)
    checkpoint.load(task.state, task.chunks, task.optimizer, folder)


def loss(reports: list[list[dict[str, Any]]]) -> float:
    """The mean over all ranks of one step."""
    losses = [micro["loss"] for (step,) in reports for micro in step["losses"]]
    return sum(losses) / len(losses)


def test_main_and_working_weights_agree_after_a_load(tmp_path: Path) -> None:
    """Others: with a precision-aware optimizer they differed, so that the loss was 0.3 before and 10 after."""
    row = Row("llama", mesh(dp=2), mesh(tp=2), {**MOMENTS, **WHOLE_MAINS})
    build = trainee(row.model, row.optimizer, row.batch_size)
    with Generation(0, row.old, range(2), build).enter() as old:
        old.ask("train", 2)
        old.ask("look", partial(save, folder=tmp_path))
        with start_next(old, row.new, range(2), build) as new:
            hand_over(old, new, range(2)).check()
            before, losses = loss(old.ask("train", 1)), []
            for way in ("moved", "loaded"):
                if way == "loaded":
                    new.ask("look", partial(load, folder=tmp_path))
                for working, main in (pair for rank in new.ask("look", working_and_main_weights) for pair in rank):
                    assert main.dtype == torch.float32
                    assert torch.equal(working, main.bfloat16()), way
                losses.append(loss(new.ask("train", 1)))
    assert losses[0] == losses[1] == pytest.approx(before, abs=1e-2)


def test_a_handover_leaves_no_process_group_behind() -> None:
    """Others: about twenty leaked in each cycle. The old generation goes on with what it had, as after a rollback."""
    build = trainee("llama", {}, 8)
    with Generation(0, mesh(dp=2), range(2), build).enter() as old:
        old.ask("train", 1)
        before = old.ask("look", process_groups)
        for number in (1, 2):
            with start_next(old, mesh(tp=2), range(2), build) as new:
                hand_over(old, new, range(2)).check()
                groups = new.ask("look", process_groups)
            assert old.ask("look", process_groups) == before, f"after handover {number}"
        old.ask("train", 1)
        with Generation(3, mesh(tp=2), range(2), build) as fresh:
            assert fresh.enter().ask("look", process_groups) == groups
