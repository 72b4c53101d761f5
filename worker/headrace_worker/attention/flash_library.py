"""Finding flash-attn: which of its versions is installed, loads, and takes what we pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

import torch

from headrace_worker.attention.base import AttentionNeed
from headrace_worker.attention.cuda import capability_of, device_obstacle

Attention = Callable[..., torch.Tensor]

_LARGEST_HEAD = 256  # elements
_HEAD_STEP = 8  # other head sizes would have the whole cache copied to pad them
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class FlashLibrary:
    """One major version of flash-attn, as it is installed."""

    title: str  # what people call it
    modules: tuple[str, ...]  # where its function may be found, the usual place first
    function: str  # the paged call
    arguments: frozenset[str]  # what we pass by name, some of it unknown to early releases
    majors: range  # compute capabilities that its kernels are built for, major number

    def load(self) -> Attention:
        """Return the paged call; raises ImportError, saying what is missing."""
        return _load(self)

    def obstacle(self, need: AttentionNeed) -> str | None:
        """Say why this version cannot do what is needed; ``None`` when it can."""
        if obstacle := device_obstacle(need, (self.majors.start, 0)):
            return f"{self.title}: {obstacle}"
        capability = capability_of(need.device)
        if capability is not None and capability[0] not in self.majors:
            found = ".".join(map(str, capability))
            return f"{self.title} has no kernels for compute capability {found}"
        try:
            self.load()
        except ImportError as error:
            return str(error)
        return self._model_obstacle(need)

    def _model_obstacle(self, need: AttentionNeed) -> str | None:
        if need.dtype not in (None, *_DTYPES):
            name = str(need.dtype).removeprefix("torch.")
            return f"{self.title} takes bfloat16 and float16, not {name}"
        head_dim = need.head_dim
        if head_dim is not None and (head_dim > _LARGEST_HEAD or head_dim % _HEAD_STEP):
            return (
                f"{self.title} takes a head_dim of up to {_LARGEST_HEAD} in steps of {_HEAD_STEP},"
                f" not {head_dim}"
            )
        return None


@cache
def _load(library: FlashLibrary) -> Attention:
    module = None
    for name in library.modules:
        try:
            module = import_module(name)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not name.startswith(error.name):
                raise ImportError(f"{library.title} does not load: {error}") from error
        except (ImportError, OSError) as error:  # built for another torch, or a library is missing
            raise ImportError(f"{library.title} does not load: {error}") from error
    if module is None:
        raise ImportError(f"{library.title} is not installed")
    attention: Attention = getattr(module, library.function)
    unknown = library.arguments - set(inspect.signature(attention).parameters)
    if unknown:
        raise ImportError(f"{library.title} is too old: it has no {', '.join(sorted(unknown))}")
    return attention
