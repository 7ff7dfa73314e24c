"""Fixtures of the trainer tests."""

from nodes import cluster, nodes

__all__ = ["cluster", "nodes"]
