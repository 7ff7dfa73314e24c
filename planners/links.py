"""Links: how fast bytes travel, from a small file that the calibration command fills."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path


@dataclass(frozen=True)
class Links:
    """Bandwidths in bytes per second, each direction at once; times in seconds.

    The defaults are what one host with two H200 measured, and a network of 400 Gb/s NICs, one a GPU and eight a node.

    Args:
        copy_bytes_per_s: a copy inside one GPU whose both ends are summed for the certificate, counted once.
        same_node_bytes_per_s: between one GPU and all others of its node (NVLink).
        nic_bytes_per_s: between one GPU and other nodes, by its own NIC.
        network_bytes_per_s: between one node and all others.
        message_s: the fixed cost of one message.
        direct_nbytes: contiguous slices of at least this many bytes are sent without being packed.
        measured_on: hardware, versions and date, for people.
    """

    copy_bytes_per_s: float = 1.9e12
    same_node_bytes_per_s: float = 3.2e11
    nic_bytes_per_s: float = 5.0e10
    network_bytes_per_s: float = 4.0e11
    message_s: float = 2.0e-5
    direct_nbytes: int = 512 * 2**20
    measured_on: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_per_s") and not value > 0:
                raise ValueError(f"{each.name}={value!r} must be above 0 bytes per second")
            if each.name in ("message_s", "direct_nbytes") and not value >= 0:
                raise ValueError(f"{each.name}={value!r} must be at least 0")

    @classmethod
    def load(cls, path: Path) -> Links:
        """The table in the JSON file at `path`; ValueError where it is not one."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a table of links: {error}") from error

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
