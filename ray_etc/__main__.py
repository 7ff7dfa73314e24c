"""The command line: `python -m ray_etc demo`."""

from __future__ import annotations

import sys
from typing import Annotated

import tyro

from ray_etc.demo.options import DemoOptions


def main() -> int:
    command = tyro.extras.subcommand_cli_from_dict({"demo": _demo}, prog="python -m ray_etc", description=__doc__)
    return int(command)


def _demo(options: Annotated[DemoOptions, tyro.conf.arg(name="")]) -> int:
    """Train a small GPT while nodes join and leave, and compare it with a run that was never resized."""
    if mistake := options.mistake():
        print(mistake, file=sys.stderr)
        return 2
    from ray_etc.demo.story import run_demo

    return run_demo(options)


if __name__ == "__main__":
    sys.exit(main())
