"""The folders, the packages that setup.cfg lists, and the way dependencies point."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    listed = set(config["options"]["packages"].split())
    folders = dict(line.split(" = ") for line in config["options"]["package_dir"].strip().splitlines())
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for top in ("ray_etc", "actors", "planners")
        for path in (ROOT / top).rglob("__init__.py")
        if not any(parent.is_symlink() for parent in path.parents)
    }
    named = {name if name.startswith("ray_etc") else f"ray_etc.{name}" for name in found}
    assert listed == named
    assert folders.keys() == listed
    assert all((ROOT / folder / "__init__.py").exists() for folder in folders.values())


@pytest.mark.parametrize("name", ["actors", "planners"])
def test_wrong_name_says_the_right_one(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"import ray_etc.{name}" in done.stderr


def test_dependencies_point_one_way() -> None:
    done = subprocess.run(["lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False, env=_with_venv())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


def test_importing_ray_etc_brings_in_no_ray_torch_or_megatron() -> None:
    check = "import ray_etc, sys; assert not {'ray', 'torch', 'megatron'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", check], check=True)


def _with_venv() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
