"""Attention backends: each owns a paged KV cache, and all compute what the reference does."""

from headrace_worker.attention.base import AttentionBackend, KVCacheSpec, PackedBatch
from headrace_worker.attention.registry import UnknownBackend, available_backends, create_backend

__all__ = [
    "AttentionBackend",
    "KVCacheSpec",
    "PackedBatch",
    "UnknownBackend",
    "available_backends",
    "create_backend",
]
