"""Fixtures for tests that start workers."""

from support.worker_fixtures import driver, farm

__all__ = ["driver", "farm"]
