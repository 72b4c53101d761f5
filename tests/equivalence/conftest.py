"""What the equivalence tests of tiny models share."""

from support.thread_fixtures import one_thread

__all__ = ["one_thread"]
