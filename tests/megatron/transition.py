"""A handover changes where the state is, and not one bit of it: the check of one row of the matrix.

What is compared never goes through the catalogue that the handover is planned from, where Megatron can say it: it is
what Megatron itself writes, by the names of its checkpoints, and what its model and optimizers hold in memory.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import torch
from logical import differing as differing_logical
from logical import whole
from matrix import Row
from ranks import Place, Worker
from resize import Generation, differing, hand_over, slots_for, start_next
from trainee import trainee


def check(row: Row, folder: Path | None = None, where: Place = Worker) -> None:
    """Move the state of `row` to its new configuration and back, and compare it by position and bit for bit.

    In `folder`, an empty one, Megatron's own checkpoint is taken through the same transition; without one, the state is
    still compared by the names that Megatron would write it under.
    """
    build = trainee(row.model, row.optimizer, row.batch_size, **row.change)
    old_slots = range(row.old.world_size)
    new_slots = slots_for(old_slots, row.new.world_size, row.elsewhere)
    has_names = row.oracle == "checkpoint"
    with Generation(0, row.old, old_slots, build, where).enter() as old:
        old.ask("train", 2)
        memory_before = old.ask("memory")
        catalogued = whole(old.ask("shards"))
        for (kind, name), values in catalogued.items():
            if kind == "main_param":  # so the ranges of the optimizer are where they should be
                weight = catalogued["param", name]
                assert torch.equal(values.to(weight.dtype), weight), f"{name} is not its main weight, rounded"
        if has_names:
            before = old.whole()
            if folder is not None:
                old.ask("save", folder)
        with start_next(old, row.new, new_slots, build, where) as new:
            hand_over(old, new, new_slots).check()
            replicated = old.digests()
            old.close()
            moved = new.ask("memory")
            assert differing_logical(catalogued, whole(new.ask("shards"))) == []
            assert new.digests() == replicated
            if has_names:
                assert differing(before, new.whole()) == []

            with Generation(2, row.old, old_slots, build, where) as back:
                hand_over(new, back, old_slots).check()
                assert [differing(a, b) for a, b in zip(memory_before, back.ask("memory"), strict=True)] == [
                    [] for _ in old_slots
                ]
                assert back.digests() == replicated

            if has_names and folder is not None:
                new.ask("reload", folder)
                by_checkpoint = new.ask("memory")
                assert [differing(a, b) for a, b in zip(by_checkpoint, moved, strict=True)] == [[] for _ in moved]
            steps = [step for steps in new.ask("train", 1) for step in steps]
            assert all(isfinite(micro["loss"]) for step in steps for micro in step["losses"])
