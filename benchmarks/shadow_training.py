"""What trains in `benchmarks.shadow`: two bare ranks, and the loop that `ElasticTrainer` runs."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

MODEL = {"num_layers": 4, "hidden_size": 128, "ffn_hidden_size": 352, "sequence_length": 64}
PRODUCTS = 30


class Trainer:
    """A rank whose step is a few matrix products and an all-reduce, in a thread of its own."""

    def __init__(self, rank: int, world_size: int, store: str, use_gpu: bool) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._device = torch.device("cuda", rank) if use_gpu else torch.device("cpu")
        backend = "nccl" if use_gpu else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
        self._is_stopping = threading.Event()
        self._step_times: list[float] = []
        self._thread = threading.Thread(target=self._train)

    def start(self) -> None:
        self._thread.start()
        time.sleep(2.0)

    def take_step_times(self) -> list[float]:
        """Of the steps since the last time."""
        taken, self._step_times = self._step_times, []
        return taken

    def stop(self) -> None:
        self._is_stopping.set()
        self._thread.join()

    def _train(self) -> None:
        import torch
        import torch.distributed as dist

        size = 8192 if self._device.type == "cuda" else 256
        matrix = torch.eye(size, device=self._device)
        gradient = torch.zeros(100_000, device=self._device)
        is_over = False
        while not is_over:
            start = time.perf_counter()
            for _ in range(PRODUCTS):
                matrix = matrix @ matrix
            gradient[0] = float(self._is_stopping.is_set())
            dist.all_reduce(gradient)
            is_over = gradient[0].item() > 0
            gradient.zero_()
            self._step_times.append(time.perf_counter() - start)


def train(config: dict[str, Any]) -> None:
    """Train a small GPT until the run is stopped. `is_warmed_up` "odd": only generations of odd numbers."""
    import ray_etc
    from ray_etc import megatron

    context = ray_etc.get_context()
    if config.get("is_warmed_up") == "odd" and context.generation % 2 == 0:
        sys.modules["ray_etc.megatron.build"].warm_up = lambda *_: False  # type: ignore[attr-defined]
    data = Path(os.__file__).parent / "json"
    task = megatron.build(MODEL, context.parallel, optimizer={"lr": 1e-3}, data=data, global_batch_size=8)
    for _ in ray_etc.steps(task.state, total=1_000_000):
        start, worked_s = time.perf_counter(), time.thread_time()
        metrics = task.train_step()
        times = {"step_s": time.perf_counter() - start, "cpu_s": time.thread_time() - worked_s}
        ray_etc.report({**metrics, **times, "pid": os.getpid(), "generation": context.generation})
