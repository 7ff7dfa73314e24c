"""Checkpoints: written by us and read by Megatron's own training script, and the other way round, bit for bit."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fused_adam import join
from host import spoil
from logical import RankShards, read, whole
from logical import differing as differing_logical
from matrix import BF16, FOUR_LAYERS, IN_FP32, MOMENTS, MUON, PLAIN, SGD, WHOLE_MAINS, Row, mesh
from megatron.core import dist_checkpointing
from oracle import parts_by_megatron, same_bits, whole_by_megatron
from ranks import run_ranks
from resize import Generation, differing, hand_over, start_next
from script import load_by_script, save_by_script
from tiny import build, parallel
from trainee import trainee

from ray_etc.actors.small_state import SmallState
from ray_etc.megatron import checkpoint
from ray_etc.planners.parallel import ParallelConfig

ROWS = [
    Row("llama", mesh(tp=2, pp=2), mesh(dp=3), BF16),
    Row("experts", mesh(dp=2, ep=2), mesh(tp=2, ep=2, etp=1), BF16),
    Row("experts", mesh(dp=2, **PLAIN), mesh(dp=2, ep=2), BF16),
    Row("experts", mesh(dp=2, ep=2, **PLAIN), mesh(pp=2, ep=2, dp=2, **PLAIN), {**MUON, **BF16}),
    Row("llama", mesh(dp=2, **PLAIN), mesh(tp=2, **PLAIN), {**SGD, **BF16}),
    Row("llama", mesh(pp=2, vpp=2), mesh(dp=2), BF16, FOUR_LAYERS),
    Row("hybrid", mesh(pp=2), mesh(cp=2), BF16),
    Row("experts", mesh(dp=2, ep=2, **PLAIN), mesh(tp=2, **PLAIN), {**MUON, "muon_scalar_optimizer": "lion", **BF16}),
]


def train_and_save(row: Row, folder: Path) -> dict[str, Any]:
    task = trainee(row.model, row.optimizer, row.batch_size, **row.change)(row.old)
    for _ in range(2):
        task.train_step()
    task.state.save_checkpoint(folder / "ours", 2)
    save_by_script(task, folder / "theirs", 2)
    return {"parts": parts_by_megatron(task), "small": SmallState.of(task.state).digests(), "next": norms(task)}


def load_each(row: Row, folder: Path) -> list[dict[str, Any]]:
    """Ours by the script, ours by us, and the script's by us, one after another into the same model."""
    task = trainee(row.model, row.optimizer, row.batch_size, **row.change)(row.new)

    def script() -> int:
        iteration, task.consumed_samples = load_by_script(task, folder / "ours")
        return iteration

    by_us = partial(checkpoint.load, task.state, task.chunks, task.optimizer)
    loads: list[Callable[[], int]] = [partial(by_us, folder / "ours"), partial(by_us, folder / "theirs")]
    came: list[dict[str, Any]] = []
    for load in [script, *loads] if is_for_script(row) else loads:
        for view in task.state.views():
            view.detach().fill_(float("nan"))
        task.scheduler.num_steps = task.consumed_samples = 0
        came.append({"iteration": load()})
        came[-1] |= {"parts": parts_by_megatron(task), "small": SmallState.of(task.state).digests()}
    came[-1]["next"] = norms(task)
    return came


def is_for_script(row: Row) -> bool:
    """Megatron reads main weights as it wrote them: with ZeRO-1 or without, and by as many chained optimizers.

    The state of SGD it cannot read at all.
    """
    return row.optimizer.get("optimizer") != "sgd" and (row.old.distributed_optimizer, row.old.has_expert_mesh) == (
        row.new.distributed_optimizer,
        row.new.has_expert_mesh,
    )


def norms(task: Any) -> list[float]:
    """Of the gradients of the next two steps, which depend on every weight and on the first update's moments."""
    return [task.train_step()["grad_norm"] for _ in range(2)]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_either_reads_what_the_other_wrote(row: Row, tmp_path: Path) -> None:
    before = run_ranks(train_and_save, row.old.world_size, row, tmp_path)
    after = run_ranks(load_each, row.new.world_size, row, tmp_path)
    saved = whole_by_megatron(rank["parts"] for rank in before)
    for number in range(len(after[0])):
        loaded = [rank[number] for rank in after]
        assert [rank["iteration"] for rank in loaded] == [2] * len(after)
        assert [rank["small"] for rank in loaded] == [before[0]["small"]] * len(after)
        assert differing(saved, whole_by_megatron(rank["parts"] for rank in loaded)) == []
    assert after[0][-1]["next"] == pytest.approx(before[0]["next"], rel=2e-2)


def run_on(config: ParallelConfig, folder: Path) -> list[float]:
    task = build(config, dropout=0.1)
    for _ in range(2):
        task.train_step()
    task.save_checkpoint(folder)
    return [task.train_step()["loss"] for _ in range(2)]


def start_from(config: ParallelConfig, source: Any) -> tuple[int, list[float]]:
    task = build(config, dropout=0.1, checkpoint=source)
    return task.state.next_step, [task.train_step()["loss"] for _ in range(2)]


def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """Under the same configuration to the last bit, with dropout."""
    config = parallel(tp=2)
    [losses, _] = run_ranks(run_on, 2, config, tmp_path)
    assert run_ranks(start_from, 2, config, tmp_path) == [(2, losses)] * 2


def test_a_run_goes_on_from_a_checkpoint_as_ray_train_names_it(tmp_path: Path) -> None:
    """Of this machine, and of storage that is fetched first, and gone again afterwards."""
    from pyarrow.fs import LocalFileSystem, SubTreeFileSystem
    from ray.train import Checkpoint

    config = parallel(tp=2)
    [losses, _] = run_ranks(run_on, 2, config, tmp_path)
    remote = Checkpoint("iter_0000002", filesystem=SubTreeFileSystem(str(tmp_path), LocalFileSystem()))
    for source in (Checkpoint.from_directory(tmp_path / "iter_0000002"), remote, FetchedAgain(tmp_path)):
        assert run_ranks(start_from, 2, config, source) == [(2, losses)] * 2
    assert not Path(remote._get_temporary_checkpoint_dir()).exists()


class FetchedAgain:
    """A checkpoint that a late rank fetches over what the others of its node have: seen of Ray's own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._begun = folder, folder.with_suffix(".begun")

    @contextmanager
    def as_directory(self) -> Iterator[str]:
        if torch.distributed.get_rank() == 1:
            part = self._folder.rename(self._folder.with_suffix(".part"))
            self._begun.touch()
            time.sleep(0.5)
            part.rename(self._folder)
        while not self._begun.exists():
            time.sleep(0.001)
        yield str(self._folder)


def save(task: Any, folder: Path) -> None:
    task.state.save_checkpoint(folder, 2)


def load_and_save(row: Row, read: Path, write: Path) -> None:
    task = trainee(row.model, row.optimizer, row.batch_size)(row.new)
    iteration = checkpoint.load(task.state, task.chunks, task.optimizer, read)
    task.state.save_checkpoint(write, iteration)


def said_of_fp32_weights(optimizer: dict[str, Any], folder: Path) -> list[str]:
    """What saving and loading are refused with."""
    task = trainee("experts", optimizer, 4, **IN_FP32)(mesh(**PLAIN))
    task.train_step()
    by_us = partial(checkpoint.load, task.state, task.chunks, task.optimizer, folder)
    said = []
    for use in (lambda: task.state.save_checkpoint(folder / "more", 2), by_us):
        with pytest.raises(ValueError, match="ZeRO-1") as refused:
            use()
        said.append(str(refused.value))
    assert not (folder / "more").exists()
    return said


@pytest.mark.parametrize("optimizer", [BF16, {**SGD, **BF16}, {**SGD, "sgd_momentum": 0.0, **BF16}], ids=str)
def test_fp32_weights_among_others_are_refused_without_zero1(optimizer: dict[str, Any], tmp_path: Path) -> None:
    """By Megatron with a bare KeyError, or an error about a number."""
    run_ranks(save_with_zero1, 1, tmp_path)
    [(saving, loading)] = run_ranks(said_of_fp32_weights, 1, optimizer, tmp_path)
    assert saving == loading
    assert saving.startswith("Megatron's checkpoints cannot hold the optimizer state of fp32 weights among those in 16")


def save_with_zero1(folder: Path) -> None:
    trainee("experts", BF16, 4, **IN_FP32)(mesh()).state.save_checkpoint(folder, 1)


def save_frozen(config: ParallelConfig, folder: Path) -> RankShards:
    task = trainee("llama", BF16, 4, frozen_layers=1)(config)
    task.train_step()
    task.state.save_checkpoint(folder, 1)
    return read(task.state)


def load_frozen(config: ParallelConfig, folder: Path) -> list[RankShards]:
    """By us, and by the script, which cannot merge the settings of a stage's optimizer that has nothing to update."""
    task = trainee("llama", BF16, 4, frozen_layers=1)(config)
    loads: list[Callable[[], Any]] = [partial(checkpoint.load, task.state, task.chunks, task.optimizer, folder)]
    if config.distributed_optimizer:
        loads.append(partial(load_by_script, task, folder))
    loaded = []
    for load in loads:
        for view in task.state.views():
            view.detach().fill_(float("nan"))
        task.scheduler.num_steps = 0
        load()
        loaded.append(read(task.state))
    return loaded


@pytest.mark.parametrize(
    ("old", "new"), [(mesh(dp=2), mesh(pp=2)), (mesh(pp=2, **PLAIN), mesh(tp=2, **PLAIN)), (mesh(pp=2), mesh(dp=2))]
)
def test_some_layers_are_frozen(old: ParallelConfig, new: ParallelConfig, tmp_path: Path) -> None:
    """Megatron's script cannot save that: the optimizer state of a stack of layers has holes. It can read ours."""
    before = whole(run_ranks(save_frozen, 2, old, tmp_path))
    after = run_ranks(load_frozen, 2, new, tmp_path)
    for loaded in zip(*after, strict=True):
        assert differing_logical(before, whole(list(loaded))) == []


def in_files(*folders: Path) -> list[dict[str, torch.Tensor]]:
    """The tensors as they are in the files."""
    loaded = [dist_checkpointing.load_plain_tensors(str(folder / "iter_0000002")) for folder in folders]
    return [{name: each for name, each in files.items() if isinstance(each, torch.Tensor)} for files in loaded]


def test_after_a_resize_it_is_that_of_a_run_built_so(tmp_path: Path) -> None:
    row = Row("llama", mesh(dp=2), mesh(tp=2), BF16)
    make = trainee(row.model, row.optimizer, row.batch_size)
    with Generation(0, row.old, range(2), make).enter() as old:
        old.ask("train", 2)
        old.ask("look", partial(save, folder=tmp_path / "old"))
        with start_next(old, row.new, range(2), make) as new:
            hand_over(old, new, range(2)).check()
            new.ask("look", partial(save, folder=tmp_path / "resized"))
    run_ranks(load_and_save, 2, row, tmp_path / "old", tmp_path / "built")
    [(resized, built)] = run_ranks(in_files, 1, tmp_path / "resized", tmp_path / "built")
    assert any(name.startswith("optimizer.state.exp_avg_sq.") for name in built)
    assert differing(resized, built) == []


def catalogued(
    model: str, config: ParallelConfig, optimizer: dict[str, Any], folder: Path, is_saving: bool
) -> RankShards:
    task = trainee(model, optimizer, 4)(config)
    if is_saving:
        task.train_step()
        task.state.save_checkpoint(folder, 1)
    else:
        checkpoint.load(task.state, task.chunks, task.optimizer, folder)
    return read(task.state)


@pytest.mark.parametrize(
    ("model", "old", "optimizer"),
    [
        ("llama", mesh(dp=2), {"overlap_grad_reduce": True, "bucket_size": 500, **BF16}),
        # An embedding that two stages hold has a bucket of its own.
        pytest.param("hybrid with two heads", mesh(pp=2, vpp=2), BF16, marks=pytest.mark.slow),
    ],
    ids=["by size", "an embedding alone"],
)
def test_the_optimizer_state_of_several_buckets_is_that_of_its_own_weights(
    model: str, old: ParallelConfig, optimizer: dict[str, Any], tmp_path: Path
) -> None:
    """Megatron by itself saves that of others: it leaves out the padding between buckets, and then counts with it."""
    before = whole(run_ranks(catalogued, 2, model, old, optimizer, tmp_path, True))
    after = whole(run_ranks(catalogued, 1, model, mesh(), BF16, tmp_path, False))
    assert differing_logical(before, after) == []


def save_remainders(folder: Path) -> tuple[RankShards, bool]:
    """What was saved, and whether it is the same after it was lost and loaded."""
    task = trainee("llama", MOMENTS, 4)(mesh(dp=2))
    for _ in range(2):
        task.train_step()
    task.state.save_checkpoint(folder / "ours", 2)
    save_by_script(task, folder / "theirs", 2)
    saved = read(task.state)
    for view in task.state.views():
        spoil(view)
    checkpoint.load(task.state, task.chunks, task.optimizer, folder / "ours")
    return saved, all(same_bits(shard.view, value) for shard, (*_, value) in zip(task.state.shards, saved, strict=True))


def test_main_weights_of_which_there_are_remainders_are_saved_whole(tmp_path: Path) -> None:
    """Others: weights and main weights differed after a load. Megatron saves remainders as if they were the latter."""
    ranks = run_ranks(save_remainders, 2, tmp_path)
    assert [is_same for _, is_same in ranks] == [True, True]
    saved = whole([shards for shards, _ in ranks])
    whole_mains = {**MOMENTS, **WHOLE_MAINS}
    loaded = whole(run_ranks(catalogued, 2, "llama", mesh(tp=2), whole_mains, tmp_path / "ours", False))
    for name in (name for kind, name in saved if kind == "main_param_remainder"):
        main = join(saved["param", name], saved["main_param_remainder", name])
        assert torch.equal(main, loaded["main_param", name])
        assert not torch.equal(main, saved["param", name].float())
    for optimizer in (MOMENTS, whole_mains):
        assert "other main weights than those" in run_ranks(refusal, 1, optimizer, tmp_path / "theirs")[0]


def refusal(optimizer: dict[str, Any], folder: Path) -> str:
    with pytest.raises(ValueError, match="checkpoint") as caught:
        catalogued("llama", mesh(), optimizer, folder, False)
    return str(caught.value)


def test_what_is_not_whole_or_not_alike_is_refused(tmp_path: Path) -> None:
    """Others: moments were dropped without a word, and training went on."""
    run_ranks(catalogued, 1, "llama", mesh(), BF16, tmp_path, True)
    place = tmp_path / "iter_0000001"
    assert "is of another data type" in run_ranks(refusal, 1, {}, place)[0]
    metadata = pickle.loads((place / ".metadata").read_bytes())
    for name in [name for name in metadata.state_dict_metadata if ".exp_avg_sq." in name]:
        del metadata.state_dict_metadata[name]
    (place / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "has no optimizer.state.exp_avg_sq.decoder" in run_ranks(refusal, 1, BF16, tmp_path)[0]
    (place / "metadata.json").unlink()
    assert "not a whole checkpoint" in run_ranks(refusal, 1, BF16, tmp_path)[0]
    assert "no checkpoint in" in run_ranks(refusal, 1, BF16, place)[0]
