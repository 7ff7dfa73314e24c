"""Trains on an autoscaled cluster that gains a node of two slots and loses it, and prints what was seen as JSON.

A script of its own, because a process has one connection to Ray and pytest uses that for the other tests' cluster.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import ray
from autoscaled_cluster import set_quota
from ray.util.placement_group import placement_group_table
from runs import finish, start, wait_until
from toy import samples_of

from ray_etc import ElasticRun

WAIT_S = 120.0
"""For each thing that must happen. It takes seconds, but other tests may keep the machine busy."""


@dataclass
class Moment:
    """The cluster and the run once something had happened. `groups` counts placement groups by their state in Ray."""

    what: str
    at_s: float
    nodes: int
    ranks: int
    step: int
    groups: dict[str, int]


class Story:
    """Waits for one thing after the other and notes each as it happens."""

    def __init__(self, run: ElasticRun) -> None:
        self._run, self._began = run, time.monotonic()
        self.moments: list[Moment] = []

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        wait_until(self._run, condition, WAIT_S)
        self.note(what)

    def until_trained_on(self, what: str) -> None:
        before = self._run.status().step
        self.until(what, lambda: self._run.status().step >= before + 20)

    def note(self, what: str) -> None:
        status = self._run.status()
        at_s = round(time.monotonic() - self._began, 2)
        ranks = status.parallel.world_size if status.parallel else 0
        self.moments.append(Moment(what, at_s, living_nodes(), ranks, status.step, groups()))
        print(self.moments[-1], file=sys.stderr, flush=True)


def living_nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def groups() -> dict[str, int]:
    return dict(Counter(group["state"] for group in placement_group_table().values()))


def main(address: str, config_file: Path, folder: Path) -> None:
    ray.init(address=address, log_to_driver=False)
    run = start(folder, (2, 4), slots=2)
    story = Story(run)
    story.until("trains on the head", lambda: run.status().step >= 3)

    set_quota(config_file, 1)
    story.until("node joined", lambda: living_nodes() == 2 and "PENDING" not in groups())
    story.until("grown", lambda: any(resize.pause_s is not None for resize in run.resizes))
    story.until_trained_on("trained on after growing")

    run.resize(2)  # the two ranks stay where most of their state is: in the first slots, those of the head
    story.note("shrunk")
    story.until("node removed", lambda: living_nodes() == 1)
    story.until_trained_on("trained on after shrinking")

    result = finish(run, folder)
    story.note("ended")
    assert result.metrics is not None
    seen = {
        "moments": [asdict(moment) for moment in story.moments],
        "resizes": [
            {
                "reason": resize.reason,
                "ranks": [resize.parallel_from.world_size, resize.parallel_to.world_size],
                "certified": resize.certified,
                "error": resize.error,
                "pause_s": resize.pause_s,
            }
            for resize in result.resizes
        ],
        "steps": len(result.reports),
        "weight": result.metrics["weight"],
        "samples": samples_of(result.reports),
    }
    print(json.dumps(seen))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
