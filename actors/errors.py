"""Errors of a run. They cross processes, so each can be pickled, and each says which group, rank and peers."""

from __future__ import annotations

from collections.abc import Sequence


class TransportError(RuntimeError):
    """A group cannot carry bytes any more: a peer is gone, the group was aborted, or the library said so."""

    def __init__(self, group: str, rank: int, peers: Sequence[int], seconds: float, reason: str) -> None:
        self.group = group
        self.rank = rank
        self.peers = tuple(peers)
        self.seconds = seconds
        self.reason = reason
        who = f"peer {self.peers[0]}" if len(self.peers) == 1 else f"peers {', '.join(map(str, self.peers)) or 'none'}"
        super().__init__(f"group {group}, rank {rank}, {who}, after {seconds:.1f} s: {reason}")

    def __reduce__(self) -> tuple[type[TransportError], tuple[str, int, tuple[int, ...], float, str]]:
        return type(self), (self.group, self.rank, self.peers, self.seconds, self.reason)


class TransportTimeout(TransportError):  # noqa: N818 - named as its siblings in the standard library
    """A deadline passed before the named peers did their part."""


class CertificateError(RuntimeError):
    """The bytes that arrived are not the bytes that left.

    Args:
        mismatches: the first moves that failed, in words: tensor, box, source and destination rank.
        count: how many failed in all.
    """

    def __init__(self, mismatches: Sequence[str], count: int) -> None:
        self.mismatches = tuple(mismatches)
        self.count = count
        more = f" (and {count - len(self.mismatches)} more)" if count > len(self.mismatches) else ""
        super().__init__(f"{count} moves failed their certificate: {'; '.join(self.mismatches)}{more}")

    def __reduce__(self) -> tuple[type[CertificateError], tuple[tuple[str, ...], int]]:
        return type(self), (self.mismatches, self.count)


class ResizeFailed(RuntimeError):  # noqa: N818 - says what happened, as Ray's own names do
    """A resize was given up; training goes on in the old configuration."""


class HoldsMore(ResizeFailed):
    """The new ranks hold more than was expected when they were started: too much beside the whole old state.

    They say so where they were built; or there was no memory to build them.
    """


class BatchNotShared(ValueError):  # noqa: N818
    """So many replicas cannot share the global batch equally.

    Args:
        replicas: the numbers of replicas that can.
    """

    def __init__(self, message: str, replicas: Sequence[int]) -> None:
        self.replicas = tuple(replicas)
        super().__init__(message)

    def __reduce__(self) -> tuple[type[BatchNotShared], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.replicas)


class StateLost(RuntimeError):  # noqa: N818
    """What is left is not the whole training state: ranks died, or a tight handover failed half-way."""
