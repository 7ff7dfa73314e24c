"""One case of benchmarks.planning in a process of its own: prints a JSON object as its last line."""

from __future__ import annotations

import json
import pickle
import resource
import sys
import time
from typing import Any

import numpy as np

from benchmarks.naive_planner import NaivePlanner
from ray_etc.planners.expected import expected_table
from ray_etc.planners.facts import facts_of
from ray_etc.planners.match import match
from ray_etc.planners.parallel import ParallelConfig
from ray_etc.planners.placement import plan_resize
from ray_etc.planners.table import LayoutTable
from ray_etc.planners.zoo import model_named

SLOTS_PER_NODE = 8
NAIVE_S = 40.0
"""Where all new ranks would take the plain reshard longer than this, an evenly spaced sample of them is planned."""
PILOT_RANKS = 32


def tables(model: str, old: ParallelConfig, new: ParallelConfig) -> tuple[LayoutTable, LayoutTable, int]:
    """What every slot holds, what every new rank shall hold, and the number of slots."""
    shape, slot_count = model_named(model), max(old.world_size, new.world_size)
    held, wanted = (expected_table(shape.tensors(p.pipeline_parallel), shape.settled(p)) for p in (old, new))
    return held.on(np.arange(old.world_size), slot_count), wanted, slot_count


def measure_plan(model: str, old: ParallelConfig, new: ParallelConfig) -> dict[str, Any]:
    """The whole plan, timed and checked, and the facts of it."""
    start, cpu_start = time.perf_counter(), time.process_time()
    held, wanted, slot_count = tables(model, old, new)
    nodes = {slot: f"node{slot // SLOTS_PER_NODE}" for slot in range(slot_count)}
    plan = plan_resize(held, wanted, new.tensor_groups(), range(slot_count), nodes, usable=nodes.keys())
    planned = time.perf_counter()
    plan.check()
    stop, cpu_s = time.perf_counter(), time.process_time() - cpu_start
    peak_rss_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = facts_of(plan)
    busiest = int(np.argmax(np.maximum(facts.sent, facts.received)))
    over_wire = [use for name, use in facts.links.items() if name != "same slot"]
    messages = sum(use.messages for use in over_wire)
    plan.for_rank(busiest)  # the first call makes the index of moves by rank
    asked = time.perf_counter()
    view = plan.for_rank(busiest)
    return {
        "ranks_from": old.world_size,
        "ranks_to": new.world_size,
        "time_s": stop - start,
        "check_s": stop - planned,
        "cpu_s": cpu_s,
        "peak_rss_bytes": peak_rss_nbytes,
        "moves": len(plan.moves),
        "nbytes_moved": facts.nbytes_moved,
        "nbytes_lower_bound": facts.nbytes_lower_bound,
        "busiest_link_bytes": facts.busiest_link_nbytes,
        "rounds": facts.rounds,
        "least_rounds": -(-facts.busiest_link_nbytes // plan.staging_nbytes),
        "messages": messages,
        "mean_message_nbytes": facts.nbytes_moved // max(messages, 1),
        "for_rank_s": time.perf_counter() - asked,
        "largest_view_nbytes": len(pickle.dumps(view)),
    }


def measure_naive(model: str, old: ParallelConfig, new: ParallelConfig) -> dict[str, Any]:
    """The plain reshard. Only its own work is timed, not the making of the lists that ranks would send it."""
    held, wanted, slot_count = tables(model, old, new)
    planner, spent = NaivePlanner(), 0.0
    for rank in range(old.world_size):
        layout = held[rank]
        start = time.perf_counter()
        planner.add_source(rank, layout)
        spent += time.perf_counter() - start
    sent, received = np.zeros((2, slot_count), dtype=np.int64)

    def plan(rank: int) -> float:
        layout = wanted[rank]
        start = time.perf_counter()
        for move in planner.moves_of(rank, layout):
            if move.src != rank:
                sent[move.src] += move.nbytes
                received[rank] += move.nbytes
        return time.perf_counter() - start

    count = new.world_size
    pilot_s = sum(map(plan, evenly(count, min(count, PILOT_RANKS))))
    affordable = int(NAIVE_S / pilot_s * min(count, PILOT_RANKS))
    sample = evenly(count, min(count, max(affordable, PILOT_RANKS)))
    is_whole = len(sample) == count
    sent[:] = received[:] = 0
    looped_s = sum(map(plan, sample))
    result = {
        "naive_time_s": spent + looped_s * count / len(sample),
        "naive_sampled_ranks": None if is_whole else len(sample),
        "naive_busiest_is_lower_bound": not is_whole,
    }
    if not is_whole:
        received = identity_received(held, wanted)
        sent[:] = 0  # what the others would ask for is not known: the busiest receiver is a lower bound
    result["naive_nbytes_moved"] = int(received.sum())
    result["naive_busiest_link_bytes"] = int(max(sent.max(), received.max()))
    return result


def evenly(count: int, picked: int) -> list[int]:
    return [index * count // picked for index in range(picked)]


def identity_received(held: LayoutTable, wanted: LayoutTable) -> np.ndarray:
    """What each new rank must receive on the slot of its own number: int64 [new ranks]."""
    own = np.arange(wanted.world_size)[:, None]
    needed = np.zeros(wanted.world_size, dtype=np.int64)
    np.add.at(needed, wanted.rank, wanted.nbytes)
    return needed - match(held, wanted).overlap().blocks(own, own)[:, 0, 0]


def main() -> None:
    case, what = json.loads(sys.argv[1]), sys.argv[2]
    measure = {"plan": measure_plan, "naive": measure_naive}[what]
    print(json.dumps(measure(case["model"], ParallelConfig(**case["old"]), ParallelConfig(**case["new"]))))


if __name__ == "__main__":
    main()
