"""A Megatron GPT of 1.35B parameters that trains through `ElasticTrainer`, and the same with restarts.

    python -m benchmarks.end_to_end --json benchmarks/results/handover-end-to-end-2xH200.json

On a host with 2 GPUs. A Ray cluster on this machine trains on one GPU; a second node joins (TP1 to TP2), is drained
(TP2 to TP1), joins again (DP1 to DP2) and is drained again. Then the same model trains in plain processes that at a
step boundary save a checkpoint, end, start anew in the other configuration, load and go on. Whatever there is no time
for within `--seconds` is left out, and named. `--cpu` trains a tiny model over gloo, to try the script. The exit status
is 0 only if every resize was certified and no loss differed by more than sums in another order explain.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.end_to_end_figures import SETTLING_STEPS
from benchmarks.end_to_end_restart import measure_restarts
from benchmarks.provenance import provenance
from ray_etc.demo.options import set_environment

LARGE = {
    "model": {
        "num_layers": 24,
        "hidden_size": 2048,
        "ffn_hidden_size": 5504,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "vocab_size": 32768,
        "sequence_length": 1024,
        "bf16": True,
    },
    "optimizer": {"lr": 2e-4, "warmup_steps": 20},
    "global_batch_size": 8,
    "micro_batch_size": 2,
}
TINY = {
    "model": {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 176, "sequence_length": 64},
    "optimizer": {"lr": 3e-3, "warmup_steps": 20},
    "global_batch_size": 8,
    "micro_batch_size": 4,
}


def compare(elastic: dict[str, Any], restarts: dict[str, Any]) -> dict[str, Any]:
    """The fastest restart each way over the pause of the same resize."""
    pauses = {each["resize"]: each["pause_s"] for each in elastic["resizes"]}
    compared: dict[str, Any] = {}
    for direction, resize in (("grow", "tp1_to_tp2"), ("shrink", "tp2_to_tp1")):
        ways = [each for each in restarts["restarts"] if each["resize"] == direction and "error" not in each]
        if ways and resize in pauses:
            fastest = min(ways, key=lambda each: each["restart_s"])
            compared[direction] = {
                "pause_s": pauses[resize],
                "fastest_restart_s": fastest["restart_s"],
                "fastest_restart": f"{fastest['format']}, {fastest['place']}",
                "over_pause": fastest["restart_s"] / pauses[resize],
            }
    return {**compared, "least": min((each["over_pause"] for each in compared.values()), default=None)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="gloo and a tiny model")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="a memory-backed folder")
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on a disk")
    parser.add_argument("--seconds", type=float, default=345.0, help="begin no restart that would end after this")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    began = time.monotonic()
    set_environment()
    if not arguments.cpu and _gpu_count() < 2:
        parser.error("this needs 2 GPUs: use --cpu to try the script")
    from benchmarks.end_to_end_elastic import measure_elastic  # Ray reads the environment when it is imported

    config = TINY if arguments.cpu else LARGE
    result: dict[str, Any] = provenance("benchmarks.end_to_end")
    result["config"] = config

    def keep(name: str, value: Any) -> None:
        """After each part, so that a run that is cut short is not lost."""
        result[name] = value
        result["seconds"] = time.monotonic() - began
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")

    elastic = measure_elastic(config, arguments.cpu, lambda value: keep("elastic", value))
    print(json.dumps(elastic["resizes"], indent=1), flush=True)
    restarts = measure_restarts(
        config,
        arguments.cpu,
        {"memory": arguments.memory, "disk": arguments.disk},
        dict(enumerate(elastic["loss"])),
        elastic["generations_from_step"][1] + SETTLING_STEPS,
        lambda seconds: time.monotonic() - began + seconds < arguments.seconds,
        lambda value: keep("restart", value),
    )
    print(json.dumps({name: value for name, value in restarts.items() if "loss_un" not in name}, indent=1), flush=True)
    keep("end_to_end_pause_over_restart", compare(elastic, restarts))
    keep("ok", elastic["is_right"] and restarts["is_right"])
    print(json.dumps(result["end_to_end_pause_over_restart"], indent=1), flush=True)
    return 0 if result["ok"] else 1


def _gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(main())
