"""Sources: every hop that the wire bytes take, with the busiest link least loaded."""

from __future__ import annotations

import numpy as np

from ray_etc.planners.balance import Network, shares
from ray_etc.planners.demands import Streams
from ray_etc.planners.fan_out import FanOut, Hops, Ways, chosen_hops, direct_hops
from ray_etc.planners.intersect import ragged


def choose_hops(streams: Streams, network: Network) -> Hops:
    """The hops of all streams. The same input gives the same hops."""
    direct = direct_hops(streams)
    ways = FanOut(streams, network).ways()
    if not ways.start:
        return direct
    busy_s = network.busy_s(direct.src, direct.dst, direct.stop - direct.start)
    nbytes = np.array(ways.stop) - np.array(ways.start)
    if ways.hops:
        share, src, dst, _ = np.array(ways.hops, dtype=np.int64).T
        busy_s += network.busy_s(src, dst, nbytes[share])
    counts = np.array([len(options) for options in ways.options], dtype=np.int64)
    option_dst = np.repeat(np.array(ways.first, dtype=np.int64), counts)
    taken = shares(nbytes, counts, np.concatenate(ways.options), option_dst, busy_s, network)
    return direct.and_then(chosen_hops(ways, _without_crumbs(taken, ways, counts, nbytes, network)))


def _without_crumbs(
    taken: np.ndarray, ways: Ways, counts: np.ndarray, nbytes: np.ndarray, network: Network
) -> np.ndarray:
    """Shares of senders with those that are not worth a message added to the largest of the same bytes."""
    owner, _ = ragged(counts)
    least = network.links.message_s * network.links.nic_bytes_per_s
    largest = np.maximum.reduceat(taken, np.cumsum(counts) - counts)
    kept = np.where((taken * nbytes[owner] >= least) | (taken == largest[owner]), taken, 0.0)
    total = np.bincount(owner, kept, len(counts))
    return kept / total[owner]
