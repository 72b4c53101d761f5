"""Where the time of a step goes: linears, attention, elementwise, head, sampling, and the rest.

The timer stands before the parts of a model while it is entered, and is gone afterwards: an engine
that nobody times pays nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

from headrace_worker.engine import runner as running
from headrace_worker.engine.runner import ModelRunner
from headrace_worker.engine.sampler import sample
from headrace_worker.model.decoder import Decoder
from headrace_worker.model.gated_linear import GatedLinear
from headrace_worker.model.kv_place import RotateThenWrite

_LINEARS = ("qkv", "output", "gate_up", "down")
_ROW_OPS = ("norm", "add_norm", "gate", "rotate")
_ATTENTION = ("begin", "write_kv", "attend")


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Seconds that steps took in each part, all of them together."""

    total_s: float  # of the runner's steps, from schedule to tokens
    linears_s: float  # projections of the layers, with gates where they are one step
    attention_s: float  # KV writes and plans included
    elementwise_s: float  # norms, residuals, rotations, activations by themselves
    head_s: float  # logits of the rows that sample
    sampling_s: float
    num_steps: int

    @property
    def rest_s(self) -> float:
        """What is left: Python, building the batch, the embedding and small tensors."""
        parts_s = self.linears_s + self.attention_s + self.elementwise_s
        return self.total_s - parts_s - self.head_s - self.sampling_s


class StepTimer:
    """Times the steps of a runner over our own decoder, within a ``with``."""

    def __init__(self, runner: ModelRunner) -> None:
        if not isinstance(runner.decoder, Decoder):
            raise TypeError(f"only our own decoder can be timed, not {type(runner.decoder)}")
        self._runner = runner
        self._decoder = runner.decoder
        self._seconds = dict.fromkeys(("total", "linears", "attention", "head", "sampling"), 0.0)
        self._seconds["elementwise"] = 0.0
        self._num_steps = 0
        self._originals: list[tuple[Any, str, Any]] = []  # owner, attribute, what it was

    def __enter__(self) -> StepTimer:
        """Stand before the parts."""
        for layer in self._decoder.layers:
            for name in _LINEARS:
                linear = getattr(layer, name)
                self._replace(layer, name, _TimedLinear(linear, self._timed("linears", linear)))
            self._replace(layer, "row_ops", self._timed_object(layer.row_ops, _ROW_OPS))
        self._replace(self._decoder, "row_ops", self._timed_object(self._decoder.row_ops, _ROW_OPS))
        self._replace(self._decoder, "logits", self._timed("head", self._decoder.logits))
        for name in _ATTENTION:
            backend = self._runner.backend
            self._replace(backend, name, self._timed("attention", getattr(backend, name)))
        self._replace(running, "sample", self._timed("sampling", sample))
        self._replace(self._runner, "execute", self._count_steps(self._runner.execute))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Put everything back."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:
                delattr(owner, name)  # the class's own shows again
            else:
                setattr(owner, name, original)

    def split(self) -> StepSplit:
        """Return what was counted so far."""
        seconds = {f"{name}_s": taken_s for name, taken_s in self._seconds.items()}
        return StepSplit(**seconds, num_steps=self._num_steps)

    def _replace(self, owner: Any, name: str, replacement: Any) -> None:
        self._originals.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, replacement)

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        seconds = self._seconds

        def call(*args: Any, **kwargs: Any) -> Any:
            started_s = perf_counter()
            result = function(*args, **kwargs)
            seconds[part] += perf_counter() - started_s
            return result

        return call

    def _timed_object(self, owner: Any, names: tuple[str, ...]) -> Any:
        parts = {name: self._timed("elementwise", getattr(owner, name)) for name in names}
        # Rotation and write to the cache stay apart, so that each is counted once, and where it is.
        calls = {name: staticmethod(call) for name, call in parts.items()}
        return type("Timed", (RotateThenWrite,), calls)()

    def _count_steps(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("total", execute)

        def call(*args: Any) -> Any:
            self._num_steps += 1
            return timed(*args)

        return call


class _TimedLinear:
    """Stands before a projection; what it is asked for besides the product, that one answers."""

    gated = GatedLinear.gated

    def __init__(self, linear: Any, call: Callable[..., Any]) -> None:
        self._linear = linear
        self._call = call

    def __call__(self, x: Any) -> Any:
        return self._call(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._linear, name)
