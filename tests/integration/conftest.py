"""Fixtures for tests that start workers."""

from support.command_fixtures import headrace
from support.worker_fixtures import connections, driver, farm

__all__ = ["connections", "driver", "farm", "headrace"]
