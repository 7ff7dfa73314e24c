"""A handover of a 7B-shaped training state between two generations of processes on the same GPUs.

    python -m benchmarks.handover --json benchmarks/results/handover-2xH200.json

Each case makes the old generation's state, with known bytes, in real processes; starts the new ones beside them, which
map it by CUDA IPC; moves, compares the certificate, and checks every byte. Rates are those of the same run: one large
message each way at once, and a copy within a GPU. With one GPU both slots share it and pass for two hosts, so the wire
is a socket; a case without messages then runs one slot of the two, which is all that its GPU would do. `--layers` makes
the model shallower, so that it fits. `--cpu` runs a tiny model, to try the script. The exit status is 0 only if every
byte was right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.handover_baselines import measure_baselines
from benchmarks.handover_cases import TINY, cases_for, mesh, model_for
from benchmarks.handover_driver import Case, measure_rates, run_case
from benchmarks.handover_ranks import MIB
from benchmarks.handover_slow import slow_network
from benchmarks.handover_tight import headroom_case, run_tight, tight_cases
from benchmarks.provenance import provenance
from ray_etc.planners.zoo import ModelShape


def against_baselines(
    model: ModelShape,
    slots: int,
    rates: dict[str, float],
    use_cpu: bool,
    places: Mapping[str, Path],
    staging_nbytes: int,
    direct_nbytes: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """The handover of a state, and checkpoints of the same state: all that is known after each of them."""
    case = Case("baseline_state", model, mesh(dp=slots), mesh(tp=slots))
    moved = run_case(case, rates, use_cpu, staging_nbytes, direct_nbytes, repeats)
    result: dict[str, Any] = {"handover": moved, "checkpoint_s": {}}
    for name, figures in measure_baselines(model.tensors(), places, 0 if use_cpu else torch.cuda.device_count(), slots):
        result[name] = figures
        result["checkpoint_s"][name] = figures["checkpoint_s"]
        result["fastest_checkpoint_over_handover"] = min(result["checkpoint_s"].values()) / moved["handover_s"]
        yield result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="ETC_GLOO and a tiny model")
    parser.add_argument("--slots", type=int, help="2, 4 or 8; as many as there are GPUs by default, 2 with --cpu")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these")
    parser.add_argument("--layers", type=int, help="at most so many in every model; an even number")
    parser.add_argument("--repeats", type=int, default=3, help="how often each handover is made again")
    parser.add_argument("--staging-mib", type=int, default=512, help="bytes that a rank sends in one round, in MiB")
    parser.add_argument("--direct-mib", type=int, default=512, help="slices of this size go without packing, in MiB")
    parser.add_argument("--baseline-layers", type=int, default=4, help="of a state that is checkpointed too; 0: none")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="where checkpoints are kept in memory")
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where checkpoints are kept on disk")
    parser.add_argument("--slow-layers", type=int, default=16, help="of the state that eight ranks exchange; 0: none")
    parser.add_argument("--json", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    if not arguments.cpu and not torch.cuda.is_available():
        parser.error("this needs GPUs: use --cpu to try the script")
    result: dict[str, Any] = provenance("benchmarks.handover")
    slots = arguments.slots or (2 if arguments.cpu else max(2, torch.cuda.device_count()))
    model_named = partial(model_for, layers=arguments.layers, is_tiny=arguments.cpu)
    model = model_named("llama2-7b")
    result["model"] = f"llama2-7b with {model.num_layers} layers, {model.num_parameters} parameters"
    result["slots"] = slots

    def keep(name: str, value: Any) -> None:
        """After each part, so that a run that is cut short is not lost."""
        result[name] = value
        print(json.dumps({name: value[-1] if isinstance(value, list) else value}), flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=2) + "\n")

    rates = measure_rates(arguments.cpu, slots)
    keep("rates", rates)
    unit = 1024 if arguments.cpu else MIB
    sizes = (arguments.staging_mib * unit, arguments.direct_mib * unit)
    how = (*sizes, arguments.repeats)
    done: list[dict[str, Any]] = []

    def measure(case: Case, run: Callable[[], dict[str, Any]]) -> None:
        if not any(part in case.name for part in arguments.only):
            return
        try:
            done.append(run())
        except Exception as error:  # the others are still worth their time
            done.append({"case": case.name, "error": f"{type(error).__name__}: {error}", "is_right": False})
        keep("cases", done)

    for case in cases_for(slots, model_named):
        measure(case, partial(run_case, case, rates, arguments.cpu, *how))
    for case in tight_cases(model):
        measure(case, partial(run_tight, case, arguments.cpu, sizes[0]))
    headroom = headroom_case(model, arguments.cpu)
    measure(headroom, partial(run_tight, headroom, arguments.cpu, sizes[0], fills=True))
    if arguments.slow_layers:
        deep = ModelShape(arguments.slow_layers, 512, 1408, 8, 8, 4096, kv_channels=64)
        shallow = TINY if arguments.cpu else deep
        keep("eight_ranks_over_sockets", slow_network(shallow, arguments.cpu, sizes[0]))
    if arguments.baseline_layers:
        shallow = TINY if arguments.cpu else replace(model, num_layers=arguments.baseline_layers)
        places = {"memory": arguments.memory, "disk": arguments.disk}
        for each in against_baselines(shallow, slots, rates, arguments.cpu, places, *how):
            keep("baselines", each)
    keep("rates_after", measure_rates(arguments.cpu, slots))
    baselines = [each for each in result.get("baselines", {}).values() if isinstance(each, dict)]
    checked = [*done, *baselines, result.get("eight_ranks_over_sockets", {})]
    keep("ok", all(each.get("is_right", True) for each in checked))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
