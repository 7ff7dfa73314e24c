"""Fixtures of the trainer tests."""

from nodes import all_nodes, cluster, nodes

__all__ = ["all_nodes", "cluster", "nodes"]
