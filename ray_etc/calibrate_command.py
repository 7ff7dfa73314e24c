"""`python -m ray_etc calibrate`: measure this host's links, for plans that say how long a resize takes."""

from __future__ import annotations

import datetime
import multiprocessing
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import tyro

from ray_etc.planners.links import Links

MIB = 2**20
PROCESS_S = 300.0
GROUP_S = 60.0
NEAR_BEST = 0.95
"""A slice is large enough to go without packing where messages of its size reach this part of the best rate."""


@dataclass(frozen=True)
class CalibrateOptions:
    """Measure copies and messages on this host, by one process a GPU, and write them as a table of links."""

    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """Where to write the JSON table."""


@dataclass(frozen=True)
class Measured:
    """What one process saw; seconds for messages of each size in bytes, each way at once with its partner."""

    copy_bytes_per_s: float
    message_s: Mapping[int, float]


def run_calibrate(options: CalibrateOptions) -> int:
    """Measure, print and write: 0, or 2 where the file could not be written."""
    import torch

    if not options.out.parent.is_dir():  # before minutes of measuring are lost
        print(f"error: --out {options.out}: there is no folder {options.out.parent}", file=sys.stderr)
        return 2

    gpus = torch.cuda.device_count()
    measured = measure(gpus or 2, use_gpus=gpus > 0)
    links = table_of(measured, hardware(gpus))
    links.save(options.out)
    for name in ("copy", "same_node"):
        print(f"{name:<10} {getattr(links, f'{name}_bytes_per_s') / 1e9:10.1f} GB/s")
    print(f"message    {links.message_s * 1e6:10.1f} us")
    print(f"direct     {links.direct_nbytes / MIB:10.1f} MiB and more without packing")
    if "messages" in links.measured_on:
        print(f"same_node, message and direct: {links.measured_on['messages']}")
    print(f"written to {options.out}; bandwidths between nodes are the defaults, not measured")
    return 0


def table_of(measured: list[Measured], measured_on: dict[str, str]) -> Links:
    """The slowest process decides. Where none had a partner to exchange with, messages keep their defaults."""
    copy = min(each.copy_bytes_per_s for each in measured)
    paired = [each.message_s for each in measured if each.message_s]
    if not paired:
        measured_on = {**measured_on, "messages": "not measured, defaults: one process has no partner"}
        return Links(copy_bytes_per_s=copy, measured_on=measured_on)
    sizes = sorted(paired[0])
    rates = {size: min(size / message_s[size] for message_s in paired) for size in sizes}
    best = max(rates.values())
    return Links(
        copy_bytes_per_s=copy,
        same_node_bytes_per_s=best,
        message_s=max(message_s[sizes[0]] for message_s in paired),
        direct_nbytes=min(size for size in sizes if rates[size] >= NEAR_BEST * best),
        measured_on=measured_on,
    )


def hardware(gpus: int) -> dict[str, str]:
    import torch

    return {
        "machine": platform.machine(),
        "processes": f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else "2 on CPUs over gloo",
        "torch": version("torch"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def measure(count: int, use_gpus: bool) -> list[Measured]:
    """By `count` processes of this host at once.

    Raises:
        RuntimeError: a process failed or took too long.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(count):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=_serve, args=(theirs, rank, count, use_gpus), daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        rendezvous = _receive(pipes[0], 0)
        for pipe in pipes:
            pipe.send(rendezvous)
        return [_receive(pipe, rank) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _receive(pipe: Any, rank: int) -> Any:
    try:
        if pipe.poll(PROCESS_S):
            return pipe.recv()
    except EOFError:
        pass
    raise RuntimeError(f"process {rank} of the calibration failed; its own error is above")


def _serve(pipe: Any, rank: int, count: int, use_gpus: bool) -> None:
    import torch

    from ray_etc.actors.transports import GlooTransport, NcclTransport, Transport

    if use_gpus:
        torch.cuda.set_device(rank)
    kind: type[Transport] = NcclTransport if use_gpus else GlooTransport
    group = kind(count, rank, "calibration")
    if rank == 0:
        pipe.send(group.rendezvous("127.0.0.1"))
    group.connect(pipe.recv(), GROUP_S)
    pipe.send(_measured(group, torch.device("cuda" if use_gpus else "cpu")))
    pipe.recv()  # held until all are done, so that no partner loses its group


def _measured(group: Any, device: Any) -> Measured:
    import torch

    from ray_etc.actors.passes import Job, Pass

    largest = 1024 * MIB if device.type == "cuda" else 4 * MIB
    source = torch.randint(0, 256, (largest,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    copying = Pass([Job(source.view(torch.int32), target.view(torch.int32), left=0, arrived=1)], sums)
    copy_s = _typical(copying.run, device)
    message_s: dict[int, float] = {}
    peer = group.rank ^ 1
    size = 4096
    while size <= largest and peer < group.world_size:
        message_s[size] = _typical(partial(_exchange, group, peer, source[:size], target[:size]), device)
        size *= 2
    return Measured(largest / copy_s, message_s)


def _exchange(group: Any, peer: int, message: Any, buffer: Any) -> None:
    group.exchange({peer: message}, {peer: buffer}, GROUP_S)


def _typical(action: Callable[[], Any], device: Any, repeats: int = 7) -> float:
    """Median seconds; the first two, which load modules, do not count."""
    import torch

    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])
