"""Which layers of a model see everything before a token, and which only a sliding window."""

from __future__ import annotations

from typing import Any

from headrace_worker.model.errors import ModelLoadError


def attention_windows(hf_config: Any) -> tuple[int | None, ...]:
    """Return each layer's window in tokens, own token counted; ``None`` is full attention.

    Without ``layer_types``, ``sliding_window`` holds for every layer.

    Raises:
        ModelLoadError: a layer type is unknown, or a window is missing or not positive.
    """
    window = getattr(hf_config, "sliding_window", None)
    num_layers = hf_config.num_hidden_layers
    if window is not None and window < 1:
        raise ModelLoadError(f"sliding_window {window!r} is not supported: it hides every token")
    layer_types = getattr(hf_config, "layer_types", None)
    if layer_types is None:
        return (window,) * int(num_layers)
    if len(layer_types) != num_layers:
        raise ModelLoadError(f"layer_types has {len(layer_types)} entries for {num_layers} layers")
    return tuple(_window(layer_type, window) for layer_type in layer_types)


def _window(layer_type: str, window: int | None) -> int | None:
    if layer_type == "full_attention":
        return None
    if layer_type != "sliding_attention":
        raise ModelLoadError(f"layer type {layer_type!r} is not supported")
    if window is None:
        raise ModelLoadError("layer type 'sliding_attention' has no sliding_window to slide")
    return window
