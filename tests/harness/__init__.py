"""Persistent worker processes on which tests run the same function under every strategy."""

from tests.harness.cluster import CallError, Cluster
from tests.harness.pool import Pool
from tests.harness.targets import KINDS, PLAIN, STRATEGIES, TARGETS, Target

__all__ = ["KINDS", "PLAIN", "STRATEGIES", "TARGETS", "CallError", "Cluster", "Pool", "Target"]
