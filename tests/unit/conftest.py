"""Fixtures for tests of single parts."""

from support.thread_fixtures import one_thread, two_threads

__all__ = ["one_thread", "two_threads"]
