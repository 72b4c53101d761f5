"""Fixtures for tests that start workers."""

from support.command_fixtures import headrace
from support.worker_fixtures import driver, farm

__all__ = ["driver", "farm", "headrace"]
