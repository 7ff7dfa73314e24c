"""A Ray head on loopback with the real autoscaler, v2, which starts and ends nodes as processes of this machine.

Ray's own `AutoscalingCluster` does not do: the wheel lacks a file that it reads, and it runs `ray stop --force`, which
ends every Ray on the machine. Here the head leads a session of its own, which the nodes that the autoscaler starts and
their workers inherit, so what must be ended is known without looking at names.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider

START_TIMEOUT_S = 120.0
OBJECT_STORE_NBYTES = 100 * 2**20
COMMANDS = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")


@dataclass(frozen=True)
class AutoscaledCluster:
    address: str
    config_file: Path


@contextmanager
def autoscaled_cluster(
    *, head_cpus: int, node_cpus: int, most_nodes: int, idle_timeout_s: float
) -> Iterator[AutoscaledCluster]:
    """The autoscaler may add up to `most_nodes` nodes, but none before `set_quota` allows it.

    In the end every process of the cluster has ended and its files are gone.
    """
    address = f"127.0.0.1:{_free_port()}"
    # Not below pytest's tmp_path: the paths of Ray's sockets would be too long.
    with tempfile.TemporaryDirectory(prefix="ray_etc_") as name:
        cluster = AutoscaledCluster(address, Path(name) / "autoscaler.json")
        _replace(cluster.config_file, _autoscaler_config(address, head_cpus, node_cpus, most_nodes, idle_timeout_s))
        with _running_head(cluster, head_cpus, Path(name)):
            yield cluster


def set_quota(config_file: Path, nodes: int) -> None:
    """How many nodes there may be beside the head; the autoscaler reads its configuration anew each time it looks."""
    _replace(config_file, {**json.loads(config_file.read_text()), "max_workers": nodes})


def _replace(config_file: Path, config: dict[str, Any]) -> None:
    """Write the whole file at once: the autoscaler may be reading it."""
    new = config_file.with_suffix(".new")
    new.write_text(json.dumps(config))
    new.replace(config_file)


def _autoscaler_config(
    address: str, head_cpus: int, node_cpus: int, most_nodes: int, idle_timeout_s: float
) -> dict[str, Any]:
    node = {"CPU": node_cpus, "object_store_memory": OBJECT_STORE_NBYTES}
    return {
        "cluster_name": "autoscaled",
        "max_workers": 0,
        "idle_timeout_minutes": idle_timeout_s / 60,
        "upscaling_speed": 10.0,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": head_cpus}, "node_config": {}, "max_workers": 0},
            "node": {"resources": node, "node_config": {}, "max_workers": most_nodes},
        },
        "provider": {
            "type": "external",  # asked for by its type, Ray would look for the file that the wheel lacks
            "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
            "gcs_address": address,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "launch_multiple": True,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        # Ray reads all of these, though there is nothing to set up on a node.
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{when}_commands": [] for when in COMMANDS},
    }


@contextmanager
def _running_head(cluster: AutoscaledCluster, cpus: int, folder: Path) -> Iterator[None]:
    environment = {
        **os.environ,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "AUTOSCALER_METRIC_PORT": "0",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_FAKE_CLUSTER": "1",
        # Under this name the provider knows the head.
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }
    options = {
        "node-ip-address": "127.0.0.1",
        "port": cluster.address.partition(":")[2],
        "num-cpus": cpus,
        "object-store-memory": OBJECT_STORE_NBYTES,
        "autoscaling-config": cluster.config_file,
        "temp-dir": folder,
        "include-dashboard": "false",
        "include-log-monitor": "false",
        # Several clusters share the machine, so no port may be fixed; 0 stands for any.
        "ray-client-server-port": _free_port(),
        "dashboard-agent-listen-port": 0,
        "min-worker-port": 0,
        "max-worker-port": 0,
    }
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--{option}={value}" for option, value in options.items()]
    log = folder / "head.log"
    with log.open("w") as output:
        head = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in log.read_text():
            if head.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the head did not start:\n{log.read_text()}")
            time.sleep(0.05)
        yield
    finally:
        _end_session(head)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _end_session(leader: subprocess.Popen[bytes]) -> None:
    """Kill every process of the session, those that start meanwhile too.

    The leader is reaped last: until then nobody else can be given its pid, by which the session is known.
    """
    while members := _living_members(leader.pid):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    leader.wait()


def _living_members(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # After the name, which may hold anything: state, parent, process group, session, ...
                state, _, _, its_session, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(its_session) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found
