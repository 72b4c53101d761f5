"""Models that transformers computes, with our packed batch, KV cache and scheduler."""

from headrace_worker.model.external.decoder import ExternalConfig, ExternalDecoder
from headrace_worker.model.external.loading import load_external

__all__ = ["ExternalConfig", "ExternalDecoder", "load_external"]
