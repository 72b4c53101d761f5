"""The fixture that calls the ``headrace`` command; the conftest of its tests imports it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.keys import Keys
from support.command import Ended, make_caller

Headrace = Callable[..., Ended]


@pytest.fixture
def headrace(
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    redis_url: str,
    queue: Keys,
) -> Headrace:
    """Give the command, pointed at the server and a queue by its environment."""
    monkeypatch.setenv("HEADRACE_REDIS_URL", redis_url)
    monkeypatch.setenv("HEADRACE_QUEUE", queue.queue)
    return make_caller(capfd, monkeypatch)
