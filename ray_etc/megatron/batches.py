"""Megatron's microbatch calculator over a resize: the samples seen decide the global batch, never the number of ranks.

The calculator is a global of Megatron's, so this holds for models of `build` and for users' own.
"""

from __future__ import annotations

import math
from itertools import zip_longest

from ray_etc.actors.errors import BatchNotShared
from ray_etc.megatron import compat
from ray_etc.planners.parallel import ParallelConfig


def follow(samples: int) -> None:
    """Tell the calculator, where one is set up, how many samples the run has seen.

    Raises:
        ValueError: the replicas cannot share the next global batch equally. Megatron would train on less of it.
    """
    if (calculator := compat.microbatch_calculator()) is None:
        return
    calculator.update(samples, consistency_check=False, verbose=False)
    size, at_once = calculator.get_current_running_global_batch_size(), compat.samples_at_once(calculator)
    if size % at_once:
        raise ValueError(
            f"the global batch of {size} after {samples} samples cannot be shared by replicas that take {at_once} "
            "samples at once"
        )


def require_shared(parallel: ParallelConfig, samples: int | None) -> None:
    """Raise BatchNotShared where replicas of `parallel` cannot share each global batch that is still to come.

    Args:
        samples: how many the run has seen; None where nobody knows, so that all batches may be to come.
    """
    if (calculator := compat.microbatch_calculator()) is None:
        return
    micro, data = calculator.get_micro_batch_size(), parallel.data_parallel
    whole, taken = calculator.get_current_global_batch_size(), calculator.get_current_running_global_batch_size()
    if taken != whole and (other := whole // (micro * data) * (micro * data)) != taken:
        raise ValueError(
            f"decrease_batch_size_if_needed takes {taken} of global_batch_size={whole}, and would take {other} with "
            f"data_parallel={data}; a global batch does not change with the replicas: set it to {taken}"
        )
    schedule = compat.batch_schedule(calculator)
    pairs = zip_longest(schedule, schedule[1:], fillvalue=(math.inf, 0))
    to_come = [size for (_, size), (until, _) in pairs if until > (samples or 0)]
    # What a replica takes at a time: a micro-batch, or one for each stage where chunks are interleaved.
    stages = parallel.pipeline_parallel if parallel.virtual_pipeline > 1 else 1
    sharing = [
        n for n in range(1, min(to_come) // micro + 1) if not any(size % (micro * stages * n) for size in to_come)
    ]
    for size in to_come:
        if size % (micro * data):
            raise BatchNotShared(
                f"a global batch of {size}, which is to come, is {size / micro:g} batches of micro_batch_size={micro}, "
                f"which data_parallel={data} cannot share equally; use fewer replicas, or wait until it is past",
                sharing,
            )
        if size % (micro * stages * data):
            raise BatchNotShared(
                f"a global batch of {size}, which is to come, is {size // (micro * data)} micro-batches a replica, "
                f"which cannot be interleaved over pipeline_parallel={parallel.pipeline_parallel} stages of "
                f"virtual_pipeline={parallel.virtual_pipeline} chunks",
                sharing,
            )
