"""What one GGUF file holds: fields of metadata, and tensors as they are stored.

The format is small, and a vocabulary is long: gguf's own reader makes several arrays of every token
and every merge, which takes seconds; here each is one string.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32  # bytes, of each tensor's place
_BOOL, _STRING, _ARRAY = 7, 8, 9
# The format's numbers of the types of fields, as struct writes them; little-endian.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_SCALARS[_BOOL] = "?"
_PLAIN = {
    GGMLQuantizationType.F64: np.float64,
    GGMLQuantizationType.F32: np.float32,
    GGMLQuantizationType.F16: np.float16,
    GGMLQuantizationType.I8: np.int8,
    GGMLQuantizationType.I16: np.int16,
    GGMLQuantizationType.I32: np.int32,
    GGMLQuantizationType.I64: np.int64,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor, not decoded."""

    name: str  # llama.cpp's
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # values; the last dimension is contiguous
    data: np.ndarray[Any, np.dtype[Any]]  # of ``shape``; rows of bytes where values come in blocks


class GgufFile:
    """One mapped file; ``fields`` and ``tensors`` keep the file's order."""

    def __init__(self, path: Path) -> None:
        """Map the file and read all but the tensors' values.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is no GGUF file, damaged, or of a version or byte order not known.
        """
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._place = 0  # of the next byte to read
        self.fields: dict[str, Any] = {}
        try:
            num_tensors = self._read_head()
            self.tensors = tuple(self._read_tensors(num_tensors))
        except (struct.error, OverflowError) as error:
            raise ValueError(f"the file ends in the middle of its header: {error}") from error

    def _read_head(self) -> int:
        """Read the fields; return how many tensors follow."""
        if (magic := self._bytes[:4]) != _MAGIC:
            raise ValueError(f"GGUF magic expected, found {magic!r}")
        self._place = 4
        if (version := self._number("I")) not in _VERSIONS:
            raise ValueError(f"GGUF version {version} is not known; known: {_VERSIONS}")
        num_tensors: int = self._number("Q")
        num_fields: int = self._number("Q")
        for _ in range(num_fields):
            key = self._string()
            if key in self.fields:
                raise ValueError(f"field {key} is there twice")
            self.fields[key] = self._value(self._number("I"))
        return num_tensors

    def _read_tensors(self, num_tensors: int) -> Iterator[StoredTensor]:
        """Read where the tensors are, then give each as a view of the file."""
        found: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in found:
                raise ValueError(f"tensor {name} is there twice")
            sizes = [self._number("Q") for _ in range(self._number("I"))]  # innermost first
            kind = GGMLQuantizationType(self._number("I"))
            found[name] = tuple(reversed(sizes)), kind, self._number("Q")
        start = _aligned(self._place, self.fields.get("general.alignment", _DEFAULT_ALIGNMENT))
        for name, (shape, kind, offset) in found.items():
            yield self._tensor(name, shape, kind, start + offset)

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: GGMLQuantizationType, place: int
    ) -> StoredTensor:
        dtype, stored = np.dtype(_PLAIN.get(kind, np.uint8)), shape
        if kind not in _PLAIN:
            block_size, block_bytes = GGML_QUANT_SIZES[kind]
            if not shape or shape[-1] % block_size:
                raise ValueError(f"tensor {name} of shape {shape} is not made of whole blocks")
            stored = (*shape[:-1], shape[-1] // block_size * block_bytes)
        count = 1
        for size in stored:
            count *= size
        if place + count * dtype.itemsize > len(self._bytes):
            raise ValueError(f"the file ends before tensor {name} does")
        data = np.frombuffer(self._bytes, dtype, count, place) if count else np.empty(0, dtype)
        return StoredTensor(name, kind, shape, data.reshape(stored))

    def _number(self, form: str) -> Any:
        return self._unpack(f"<{form}")[0]

    def _unpack(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(form, self._bytes, self._place)
        self._place += struct.calcsize(form)
        return values

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        """Read so many strings, each behind its length. A long loop, so what it needs is near.

        Of a vocabulary, single tokens need not be whole characters.
        """
        data, place, length_of = self._bytes, self._place, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            begin = place + 8
            place = begin + length_of(data, place)[0]
            if place > len(data):
                raise ValueError("the file ends in the middle of a string")
            strings.append(data[begin:place].decode("utf-8", "replace"))
        self._place = place
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        return self._number(_form(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        form = _form(kind)
        if count > len(self._bytes):
            raise ValueError(f"an array of {count} values is longer than the file")
        return list(self._unpack(f"<{count}{form}"))


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"a field has type {kind}, which is not known")
    return _SCALARS[kind]


def _aligned(place: int, alignment: Any) -> int:
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {alignment!r}, not a power of two")
    return -(-place // alignment) * alignment
