"""What a CUDA device is used for beyond running a forward: recorded decodes, and all its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from headrace_worker.attention import AttentionBackend, KVCacheSpec
from headrace_worker.engine.cuda_capture import CudaCapture, try_to_record
from headrace_worker.engine.device_memory import MemoryUse, Meter, measure, measure_two_graphs
from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.graphs import (
    Capture,
    GraphedDecoder,
    GraphLimits,
    graph_sizes,
)
from headrace_worker.engine.largest_step import LargestStep
from headrace_worker.engine.runner import Decoder
from headrace_worker.engine.scores import MAX_ROWS
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model import Decoder as NativeDecoder

_CAPTURABLE = ("flash", "triton")  # attention that never waits for the device
_BLOCKS_TO_MEASURE = 2  # the trash block and another: all that a measured step touches


def graphs_obstacle(
    device: torch.device, backend: str, *, is_native: bool, num_ranks: int
) -> str | None:
    """Return why decodes cannot be recorded; None: nothing is known to be in the way."""
    if device.type != "cuda":
        return f"graphs are CUDA's, and the device is {device.type!r}"
    if backend not in _CAPTURABLE:
        return f"attention by {backend!r} waits for the device"
    if not is_native:
        return "the model runs on transformers' code"
    return None if num_ranks == 1 else f"over {num_ranks} ranks they have not been tried"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device with a loaded model on it, before its KV cache is allocated and after."""

    settings: EngineSettings
    decoder: Decoder  # this rank's, as it was loaded
    backend: AttentionBackend
    spec: KVCacheSpec
    max_model_len: int  # tokens, prompt and output together
    num_ranks: int

    @property
    def records_graphs(self) -> bool:
        """Whether decodes are recorded, if the device can; what ranks tell each other is not."""
        obstacle = graphs_obstacle(
            self.spec.device,
            self.backend.name,
            is_native=isinstance(self.decoder, NativeDecoder),
            num_ranks=self.num_ranks,
        )
        return self.settings.cuda_graphs and obstacle is None

    @property
    def is_one_ahead(self) -> bool:
        """Whether a step is scheduled while the one before it runs."""
        wanted = self.settings.one_ahead
        return self.spec.device.type == "cuda" if wanted is None else wanted

    def with_graphs(self, decoder: Decoder) -> Decoder:
        """Return the decoder with its decodes recorded, where that can be done."""
        if not self.records_graphs:
            return decoder
        return try_to_record(self._graphed(), decoder, CudaCapture())

    def survey(self, meter: Meter, make_capture: Callable[[], Capture] = CudaCapture) -> MemoryUse:
        """Measure what the largest step and the graphs take; leaves a cache of two blocks.

        Raises SettingsError when the device has no memory for such a step.
        """
        self.backend.allocate(self.spec, _BLOCKS_TO_MEASURE)
        try:
            return self._measure(meter, make_capture)
        except torch.OutOfMemoryError as error:
            raise SettingsError(
                f"no memory for a step of max_num_batched_tokens"
                f" {self.settings.max_num_batched_tokens} and max_num_seqs"
                f" {self.settings.max_num_seqs}: {error}"
            ) from error

    def _measure(self, meter: Meter, make_capture: Callable[[], Capture]) -> MemoryUse:
        step = self.largest_step()
        run = partial(step.run, self.decoder, self.backend, self.spec.device)
        if not self.records_graphs:
            return measure(meter, run, None, num_graphs=0)
        record_two = partial(self._try_two_graphs, meter, make_capture)
        return measure(meter, run, record_two, num_graphs=len(self._graph_limits().sizes))

    def largest_step(self) -> LargestStep:
        """Return the largest step that the settings allow."""
        cache_bytes = self.settings.kv_cache_memory_bytes
        return LargestStep(
            num_tokens=self.settings.max_num_batched_tokens,
            num_seqs=self.settings.max_num_seqs,
            num_rows=max(self.settings.max_num_seqs, MAX_ROWS),
            max_model_len=self.max_model_len,
            block_size=self.spec.block_size,
            num_steps_in_flight=2 if self.is_one_ahead else 1,
            max_num_keys=None if cache_bytes is None else cache_bytes // self.spec.bytes_per_token,
        )

    def _try_two_graphs(self, meter: Meter, make_capture: Callable[[], Capture]) -> tuple[int, int]:
        """Measure two graphs; a device that cannot record needs nothing for them."""
        try:
            sizes = self._graph_limits().sizes
            return measure_two_graphs(meter, self._graphed(), make_capture(), sizes)
        except RuntimeError:
            return 0, 0

    def _graphed(self) -> GraphedDecoder:
        return GraphedDecoder(self.decoder, self.backend, self._graph_limits(), self.spec.device)

    def _graph_limits(self) -> GraphLimits:
        sizes = graph_sizes(self.settings.max_num_seqs)
        return GraphLimits(sizes, self.spec.block_size, self.max_model_len)
