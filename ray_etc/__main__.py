"""The command line: `python -m ray_etc demo`, `plan` and `calibrate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import tyro

from ray_etc.calibrate_command import CalibrateOptions, run_calibrate
from ray_etc.demo.options import DemoOptions
from ray_etc.plan_command import PlanOptions, run_plan


def main() -> int:
    commands: dict[str, Callable[..., int]] = {"demo": _demo, "plan": _plan, "calibrate": _calibrate}
    return tyro.extras.subcommand_cli_from_dict(commands, prog="python -m ray_etc", description=__doc__)


def _demo(options: Annotated[DemoOptions, tyro.conf.arg(name="")]) -> int:
    """Train a small GPT while nodes join and leave, and compare it with a run that was never resized."""
    if mistake := options.mistake():
        print(mistake, file=sys.stderr)
        return 2
    from ray_etc.demo.story import run_demo

    return run_demo(options)


def _plan(options: Annotated[PlanOptions, tyro.conf.arg(name="")]) -> int:
    """Print what a resize of a public model would move, on a cluster that need not exist."""
    return run_plan(options)


def _calibrate(options: Annotated[CalibrateOptions, tyro.conf.arg(name="")]) -> int:
    """Measure this host's links, for plans that say how long a resize takes."""
    return run_calibrate(options)


if __name__ == "__main__":
    sys.exit(main())
