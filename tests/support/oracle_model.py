"""The oracle as a pure function: a prefix's logits are a hash of its token ids and places.

No floating point decides anything: a logit is one of 2**14 numbers that float32 holds exactly, no
two of a row are equal, and any other id, place or length gives another row.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from hashlib import blake2b

VOCAB_SIZE = 64  # the longest digest of blake2b: a byte a token
ENTRY_BYTES = 8  # of one token in the cache: id and place, int32 each


def pack_entry(token_id: int, place: int) -> bytes:
    """Return what the cache holds of one token."""
    return struct.pack("<ii", token_id, place)


def pack_prefix(token_ids: Iterable[int]) -> bytes:
    """Return what the cache must hold, in order, of a sequence that starts with these tokens."""
    return b"".join(pack_entry(token_id, place) for place, token_id in enumerate(token_ids))


def hash_prefix(entries: bytes) -> int:
    """Return the signed 64-bit hash of the entries up to a token: its hidden state."""
    return int.from_bytes(blake2b(entries, digest_size=8).digest(), "little", signed=True)


def hash_logits(prefix_hash: int) -> bytes:
    """Return a byte for each token of the vocabulary: how likely it comes next."""
    return blake2b(prefix_hash.to_bytes(8, "little", signed=True), digest_size=64).digest()


def row_of_hash(prefix_hash: int) -> list[float]:
    """Return the row ``[VOCAB_SIZE]`` of a hidden state: multiples of 1/2048 in [-4, 4)."""
    ranks = hash_logits(prefix_hash)
    return [(rank * VOCAB_SIZE + token_id) / 2048 - 4 for token_id, rank in enumerate(ranks)]


def exact_logits(token_ids: Sequence[int]) -> list[float]:
    """Return the row that follows these tokens."""
    return row_of_hash(hash_prefix(pack_prefix(token_ids)))
