"""A global batch that grows with the samples seen: the same steps, samples and losses whatever the replicas."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from matrix import mesh
from megatron.core import num_microbatches_calculator
from ranks import run_ranks
from resize import Generation, Run, Stage, hand_over, run, start_next
from test_resized_runs import TOLERANCE, largest_difference
from tiny import ONE, build, parallel
from trainee import trainee

import ray_etc.megatron
from ray_etc.actors.errors import BatchNotShared
from ray_etc.megatron import BatchConfig
from ray_etc.planners.parallel import ParallelConfig

RAMP = {0: 4, 8: 8, 24: 16}
SIZES = [4, 4, 8, 8, 16, 16]


def test_samples_decide_the_batch() -> None:
    batch = BatchConfig(global_batch_size=RAMP, micro_batch_size=2)
    samples = 0
    for step, size in enumerate(SIZES):
        assert batch.samples_before(step, at_once=2) == samples
        assert batch.size_after(samples) == size
        samples += size
    # A rank of four replicas cannot be at a batch of four.
    assert [batch.samples_before(step, at_once=8) for step in range(4)] == [8, 8, 8, 16]
    assert BatchConfig(global_batch_size=6).samples_before(7, at_once=3) == 42
    # A batch that goes beyond all of the next part.
    assert BatchConfig(global_batch_size={0: 100, 10: 8, 20: 16}).samples_before(2, at_once=2) == 116
    with pytest.raises(ValueError, match="does not say the first batch; begin at 0"):
        BatchConfig(global_batch_size={8: 8})
    with pytest.raises(ValueError, match="global_batch_size=6 must be a multiple of micro_batch_size=4"):
        BatchConfig(global_batch_size={0: 4, 8: 6}, micro_batch_size=4)


def ramped(*stages: Stage) -> Run:
    return run(stages, data=Path(__file__), global_batch_size=RAMP)


def test_ramp_goes_on_over_resizes_as_in_an_unbroken_run() -> None:
    """The last replicas could not share the first batch; it is past by then."""
    after = ramped(Stage(ONE, 2), Stage(parallel(dp=2), 2), Stage(parallel(dp=4), 2))
    plain = ramped(Stage(ONE, 6))
    assert [len(step) for step in after.samples] == SIZES
    assert list(chain(*after.samples)) == list(range(sum(SIZES)))
    assert largest_difference(after, plain) < TOLERANCE


def refusals(task: Any, *configurations: ParallelConfig) -> list[str]:
    said = []
    for config in configurations:
        try:
            task.state.check_parallel(config)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    return said


def test_configuration_is_refused_while_a_batch_to_come_does_not_divide() -> None:
    def at_each_step() -> list[list[str]]:
        task = build(ONE, global_batch_size=RAMP)
        said = []
        for _ in range(4):
            said.append(refusals(task, parallel(dp=2), parallel(dp=4), parallel(dp=8)))
            task.train_step()
        return [*said, refusals(task, parallel(dp=8))]

    (said,) = run_ranks(at_each_step, 1)
    four = (
        "a global batch of 4, which is to come, is 2 batches of micro_batch_size=2, which data_parallel=4 cannot share "
        "equally; use fewer replicas, or wait until it is past"
    )
    eights = [each[2] for each in said[:4]]
    assert [each[:2] for each in said[:4]] == [["", four]] * 2 + [["", ""]] * 2
    assert [text[:17] for text in eights] == ["a global batch of"] * 4
    assert "batch of 4," in eights[1]
    assert "batch of 8," in eights[2]
    assert said[4] == [""]


def test_first_generation_is_refused_where_the_first_batch_does_not_divide() -> None:
    def refusal() -> tuple[str, tuple[int, ...]]:
        with pytest.raises(BatchNotShared, match="a global batch of 4, which is to come") as caught:
            build(parallel(dp=4), global_batch_size=RAMP)
        return str(caught.value), caught.value.replicas

    [(_, replicas)] = set(run_ranks(refusal, 4))
    assert replicas == (1, 2)


def look(task: Any) -> tuple[int, int, float]:
    return task.consumed_samples, task.scheduler.num_steps, task.optimizer.param_groups[0]["lr"]


def test_users_own_calculator_and_a_scheduler_that_counts_samples_go_on() -> None:
    make = trainee("llama", {"batch_size_schedule": "0:4 8:8 24:16"}, 16)

    def unbroken() -> list[Any]:
        task = make(mesh())
        return [[task.train_step()["samples"], *look(task)] for _ in SIZES]

    (plain,) = run_ranks(unbroken, 1)
    steps: list[Any] = []
    with Generation(0, mesh(), range(1), make).enter() as old:
        for _ in SIZES[:3]:
            steps.append([old.ask("train", 1)[0][0]["samples"], *old.ask("look", look)[0]])
        assert old.ask("look", refuse_sixteen)[0].startswith("a global batch of 8, which is to come")
        with start_next(old, mesh(dp=2), range(2), make) as new:
            hand_over(old, new, range(2)).check()
            for _ in SIZES[3:]:
                steps.append([new.ask("train", 1)[1][0]["samples"], *new.ask("look", look)[1]])
    assert steps == plain
    assert [samples for samples, *_ in steps] == SIZES


def refuse_sixteen(task: Any) -> str:
    return refusals(task, mesh(dp=8))[0]


def test_calculator_that_would_change_the_batch_is_refused() -> None:
    """Others: the global batch changed with the number of replicas."""

    def messages() -> list[str]:
        task = trainee("llama", {"batch_size_schedule": "0:4 8:8"}, 8)(mesh())
        with pytest.raises(ValueError, match="give it an attribute consumed_samples") as caught:
            ray_etc.megatron.state(task.chunks, task.optimizer, vocab_size=task.config.vocab_size)
        calculator: Any = num_microbatches_calculator._GLOBAL_NUM_MICROBATCHES_CALCULATOR
        calculator.micro_batch_times_data_parallel_size = 8
        with pytest.raises(ValueError, match="the global batch of 4 after 0 samples cannot be shared") as late:
            task.state.replicated["loader"].load_state_dict({"consumed_samples": 0})
        num_microbatches_calculator.destroy_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(0, None, 10, 4, 1, True)
        state = ray_etc.megatron.state(task.chunks, task.optimizer, vocab_size=task.config.vocab_size)
        state.check_parallel(mesh(dp=2))
        with pytest.raises(ValueError, match="takes 8 of global_batch_size=10, and would take 0") as fewer:
            state.check_parallel(mesh(dp=3))
        return [str(each.value) for each in (caught, late, fewer)]

    (said,) = run_ranks(messages, 1)
    assert len(set(said)) == 3


def test_a_checkpoint_is_named_by_its_steps_and_the_ramp_goes_on_from_it(tmp_path: Path) -> None:
    def save() -> tuple[str, float]:
        task = build(ONE, global_batch_size=RAMP)
        for _ in SIZES[:3]:
            task.train_step()
        return task.save_checkpoint(tmp_path).name, task.train_step()["loss"]

    def go_on() -> tuple[int, list[int], float]:
        task = build(parallel(dp=2), global_batch_size=RAMP, checkpoint=tmp_path)
        report = task.train_step()
        return task.state.next_step, report["sample_ids"], report["loss"]

    ((name, loss),) = run_ranks(save, 1)
    assert name == "iter_0000003"
    first, second = run_ranks(go_on, 2)
    assert first[0] == 3
    assert sorted(first[1] + second[1]) == list(range(16, 24))
    assert first[2] == pytest.approx(loss, abs=TOLERANCE)


def test_checkpoint_whose_learning_rate_counts_samples_is_not_taken_for_one_of_steps(tmp_path: Path) -> None:
    def message() -> str:
        task = build(ONE)
        task.train_step()
        task.scheduler.step(7)  # as Megatron's script, after a step of eight samples
        task.save_checkpoint(tmp_path)
        with pytest.raises(ValueError, match="has 1 steps behind it, but its learning rate is at 8") as caught:
            build(ONE, checkpoint=tmp_path)
        return str(caught.value)

    run_ranks(message, 1)
