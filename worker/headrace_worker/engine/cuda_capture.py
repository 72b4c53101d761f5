"""The one place that records CUDA graphs; which, of what and when is decided in ``graphs``."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from headrace_worker.engine.graphs import Capture, GraphedDecoder, Replay
from headrace_worker.engine.runner import Decoder

_WARM_UPS = 2  # forwards in which kernels are compiled and libraries take their workspaces


class CudaCapture:
    """Records graphs that share one pool of memory, because one at a time is replayed.

    All on one stream: cuBLAS keeps a workspace for each on which it was ever called.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Replay:
        """Record what ``compute`` does on the device; it must not wait for the device meanwhile."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                compute()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with (
            # Where the end of a recording fails, torch stays on its stream, and we would with it.
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream),
        ):
            output = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay


def try_to_record(graphed: GraphedDecoder, decoder: Decoder, capture: Capture) -> Decoder:
    """Return the decoder with its graphs, or as it was, with a warning that says why."""
    try:
        graphed.capture(capture)
    except RuntimeError as error:  # a library that waits for the device, or too little memory
        warnings.warn(f"decodes run without CUDA graphs: {error}", stacklevel=2)
        return decoder
    return graphed
