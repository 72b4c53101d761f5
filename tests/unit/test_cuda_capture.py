"""How CUDA graphs are recorded: what torch is asked for, by a stand-in that notes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from headrace_worker.engine.cuda_capture import CudaCapture


class Streams:
    """Streams of a device that does not exist, and what was computed on which."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.current = "default"
        self.computed: list[tuple[str, bool]] = []  # on which stream, and whether it was recorded
        self.pools: list[object] = []  # of each graph
        self._is_recording = False

    def make(self) -> Stream:
        self.made.append(f"aside {len(self.made)}")
        return Stream(self.made[-1])

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def record(self, graph: object, *, pool: object, stream: Stream) -> Iterator[None]:
        """Stay on the stream, as torch does, where what is recorded fails."""
        self.pools.append(pool)
        before, self.current, self._is_recording = self.current, stream.name, True
        yield
        self.current, self._is_recording = before, False

    def compute(self) -> torch.Tensor:
        self.computed.append((self.current, self._is_recording))
        return torch.tensor(len(self.computed))


class Stream:
    """One of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waited_for: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other.name)


class Graph:
    """Counts its replays."""

    num_replays = 0

    def replay(self) -> None:
        Graph.num_replays += 1


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """What stands in for torch's streams and graphs."""
    found, default = Streams(), Stream("default")
    stand_ins: dict[str, Any] = {
        "Stream": found.make,
        "stream": found.on,
        "graph": found.record,
        "current_stream": lambda: default,
        "CUDAGraph": Graph,
        "graph_pool_handle": object,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


def test_all_graphs_are_warmed_up_and_recorded_on_one_stream(streams: Streams) -> None:
    """For each stream, cuBLAS would keep a workspace of megabytes for ever."""
    capture = CudaCapture()
    for _ in range(3):
        capture(streams.compute)
    assert streams.made == ["aside 0"]
    assert streams.computed == 3 * [("aside 0", False), ("aside 0", False), ("aside 0", True)]
    assert len(set(map(id, streams.pools))) == 1


def test_a_replay_gives_the_output_that_was_recorded(streams: Streams) -> None:
    """Nothing is computed by Python any more."""
    replay = CudaCapture()(streams.compute)
    before = Graph.num_replays
    assert replay() is replay()
    assert int(replay()) == 3
    assert Graph.num_replays == before + 3


def test_after_a_recording_that_failed_work_goes_on_where_it_was(streams: Streams) -> None:
    """Steps without graphs run on the stream on which the cache was filled."""

    def fail_when_recorded() -> torch.Tensor:
        if len(streams.computed) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")
        return streams.compute()

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaCapture()(fail_when_recorded)
    assert streams.current == "default"
