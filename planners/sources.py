"""Sources: every hop that the wire bytes take, with the busiest link least loaded."""

from __future__ import annotations

import numpy as np

from ray_etc.planners.balance import Network, shares
from ray_etc.planners.demands import Streams
from ray_etc.planners.fan_out import Hops, Ways, chosen_hops, direct_hops, fan_out
from ray_etc.planners.intersect import ragged

RELAYS_MAY_COST = 1.05
"""Bytes are handed on unless the busiest link would be done this much earlier without."""


def choose_hops(streams: Streams, network: Network) -> Hops:
    """The hops of all streams. The same input gives the same hops.

    Ranks that want the same bytes hand them on to each other; only where that makes the busiest link later, since those
    who would hand on are the busiest already, does everyone fetch from the holders.
    """
    fixed = direct_hops(streams)
    ways = fan_out(streams, network)
    if not ways.start:
        return fixed
    relayed = fixed.and_then(_chosen(ways, fixed, network))
    if not ways.hops or _busiest_s(relayed, network) <= RELAYS_MAY_COST * _least_s(streams, network):
        return relayed
    fetched = fixed.and_then(_chosen(fan_out(streams, network, relays=False), fixed, network))
    is_better = RELAYS_MAY_COST * _busiest_s(fetched, network) < _busiest_s(relayed, network)
    return fetched if is_better else relayed


def _chosen(ways: Ways, fixed: Hops, network: Network) -> Hops:
    """The hops of `ways` with the best senders, beside the hops that are `fixed`."""
    busy_s = network.busy_s(fixed.src, fixed.dst, fixed.stop - fixed.start)
    nbytes = np.array(ways.stop) - np.array(ways.start)
    if ways.hops:
        share, src, dst, _ = np.array(ways.hops, dtype=np.int64).T
        busy_s += network.busy_s(src, dst, nbytes[share])
    counts = np.array([len(options) for options in ways.options], dtype=np.int64)
    option_dst = np.repeat(np.array(ways.first, dtype=np.int64), counts)
    taken = shares(nbytes, counts, np.concatenate(ways.options), option_dst, busy_s, network)
    return chosen_hops(ways, _without_crumbs(taken, ways, counts, nbytes, network))


def _busiest_s(hops: Hops, network: Network) -> float:
    return float(network.busy_s(hops.src, hops.dst, hops.stop - hops.start).max(initial=0.0))


def _least_s(streams: Streams, network: Network) -> float:
    """What no plan without relays can be faster than: some rank gets all that it wants, by both of its links at once
    what its own node holds, and by its NIC what no rank there does."""
    node_count = int(network.node.max(initial=-1)) + 1
    (stream, rank), (held, holder) = (
        (np.repeat(np.arange(streams.class_count), np.diff(first)), ranks)
        for first, ranks in (streams.wanters_of, streams.holders_of)
    )
    is_near = np.isin(stream * node_count + network.node[rank], held * node_count + network.node[holder])
    nbytes, count, links = streams.nbytes[stream], len(network.node), network.links
    wanted = np.bincount(rank, nbytes, count)
    far = np.bincount(rank[~is_near], nbytes[~is_near], count)
    by_both = float(wanted.max(initial=0)) / (links.same_node_bytes_per_s + links.nic_bytes_per_s)
    return max(by_both, float(far.max(initial=0)) / links.nic_bytes_per_s)


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
