"""Attention backends: each owns a paged KV cache, and all compute what the reference does."""

from headrace_worker.attention.base import (
    AttentionBackend,
    AttentionNeed,
    KVCacheSpec,
    PackedBatch,
    UnusableBackend,
)
from headrace_worker.attention.registry import (
    UnknownBackend,
    available_backends,
    create_backend,
    judge_backends,
)

__all__ = [
    "AttentionBackend",
    "AttentionNeed",
    "KVCacheSpec",
    "PackedBatch",
    "UnknownBackend",
    "UnusableBackend",
    "available_backends",
    "create_backend",
    "judge_backends",
]
