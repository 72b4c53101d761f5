"""What a caller attaches to a request and gets back with its completion: plain values, not many."""

from __future__ import annotations

from typing import Any

from headrace.errors import InvalidRequest
from headrace.packing import pack, text

MAX_METADATA_BYTES = 16 * 1024  # as msgpack


def checked_metadata(metadata: object) -> dict[str, Any]:
    """Return the metadata, empty for None.

    Raises InvalidRequest unless it is a map with text keys, small enough to travel.
    """
    if metadata is None:
        return {}
    if not isinstance(metadata, dict):
        raise InvalidRequest(f"metadata must be a map, not {type(metadata).__name__}")
    for key in metadata:
        text("a key of metadata", key)
    try:
        size = len(pack(metadata))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"metadata cannot be encoded: {error}") from error
    if size > MAX_METADATA_BYTES:
        raise InvalidRequest(f"metadata has {size} bytes, at most {MAX_METADATA_BYTES} are taken")
    return metadata
