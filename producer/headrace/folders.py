"""Where Headrace keeps things: models and kernels in a cache, the queue in a state folder."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what can be fetched or built again: models, kernels.

    ``HEADRACE_CACHE_DIR``, else ``$XDG_CACHE_HOME/headrace``, else ``~/.cache/headrace``.
    """
    return _folder(environ, "HEADRACE_CACHE_DIR", "XDG_CACHE_HOME", ".cache")


def state_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of what must survive: the embedded queue and the logs.

    ``HEADRACE_STATE_DIR``, else ``$XDG_STATE_HOME/headrace``, else ``~/.local/state/headrace``.
    """
    return _folder(environ, "HEADRACE_STATE_DIR", "XDG_STATE_HOME", ".local/state")


def models_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that holds one folder per pulled model."""
    return cache_folder(environ) / "models"


def _folder(environ: Mapping[str, str], own: str, xdg: str, fallback: str) -> Path:
    if folder := environ.get(own):
        return Path(folder).expanduser().absolute()
    base = environ.get(xdg, "")
    # The XDG specification tells readers to ignore relative paths.
    root = Path(base) if Path(base).is_absolute() else Path.home() / fallback
    return root / "headrace"
