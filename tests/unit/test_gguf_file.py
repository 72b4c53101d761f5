"""Reading GGUF files: what gguf's own reader finds, and damage by its name."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.quants import quantize

from headrace_worker.gguf_file import GgufFile

HEAD = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k"
SCALARS = {
    GGUFValueType.UINT8: 255,
    GGUFValueType.INT8: -128,
    GGUFValueType.UINT16: 65_535,
    GGUFValueType.INT16: -32_768,
    GGUFValueType.UINT32: 2**32 - 1,
    GGUFValueType.INT32: -(2**31),
    GGUFValueType.FLOAT32: 0.5,
    GGUFValueType.UINT64: 2**64 - 1,
    GGUFValueType.INT64: -(2**63),
    GGUFValueType.FLOAT64: 1e300,
    GGUFValueType.BOOL: True,
    GGUFValueType.STRING: "für 客",
}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file with a field of every type, and a tensor of every kind of the writer's."""
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    for kind, value in SCALARS.items():
        writer.add_key_value(f"one.{kind.name}", value, kind)
        writer.add_key_value(f"two.{kind.name}", [value, value], GGUFValueType.ARRAY, kind)
    writer.add_array("tokens", ["a", "", "bc"])
    for name in KINDS:
        kind = GGMLQuantizationType[name]
        values = np.linspace(-1, 1, 6 * 64, dtype=np.float32).reshape(2, 3, 64)
        writer.add_tensor(f"tensor.{name}", quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("integers", np.arange(5, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "all.gguf"


def written(folder: Path, content: bytes) -> Path:
    """Write a file as it is."""
    path = folder / "made.gguf"
    path.write_bytes(content)
    return path


def test_fields_are_those_of_gguf_s_reader(path: Path) -> None:
    """Every type of field, alone and in an array, in the file's order."""
    theirs = GGUFReader(path).fields
    contents = {key: f.contents() for key, f in theirs.items() if not key.startswith("GGUF.")}
    assert list(GgufFile(path).fields.items()) == list(contents.items())


@pytest.mark.parametrize("kind", SCALARS)
def test_a_value_is_what_was_written(path: Path, kind: GGUFValueType) -> None:
    """The smallest and the largest numbers of each type keep their sign and size."""
    fields = GgufFile(path).fields
    assert fields[f"one.{kind.name}"] == SCALARS[kind]
    assert type(fields[f"one.{kind.name}"]) is type(SCALARS[kind])
    assert fields["tokens"] == ["a", "", "bc"]


def test_tensors_are_those_of_gguf_s_reader(path: Path) -> None:
    """Name, kind, shape and every stored byte agree, blocks and plain numbers alike."""
    theirs = GGUFReader(path).tensors
    ours = GgufFile(path).tensors
    assert [t.name for t in ours] == [t.name for t in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.kind, list(mine.shape)) == (other.tensor_type, other.shape.tolist()[::-1])
        assert (mine.data.dtype, mine.data.shape) == (other.data.dtype, other.data.shape)
        assert np.array_equal(mine.data, other.data)


def test_a_token_that_is_no_character_is_read(tmp_path: Path) -> None:
    """Vocabularies hold halves of characters; they keep nobody from reading the rest."""
    array = struct.pack("<IIQQ", 9, 8, 1, 2) + b"\xe5a"
    assert GgufFile(written(tmp_path, HEAD + array)).fields == {"k": ["\ufffda"]}


def test_every_cut_through_the_header_is_refused(path: Path, tmp_path: Path) -> None:
    """However much of a download is missing, it is a ValueError."""
    whole = path.read_bytes()
    for size in (*range(1, 400), len(whole) // 2, len(whole) - 32):
        with pytest.raises(ValueError, match=r"the file ends|magic"):
            GgufFile(written(tmp_path, whole[:size]))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" * 9, "GGUF magic expected, found b'PK"),
        (b"GGUF" + struct.pack("<I", 1), "version 1 is not known; known: (2, 3)"),
        (b"GGUF" + struct.pack(">I", 3), "version 50331648 is not known"),
        (HEAD + struct.pack("<I", 13), "a field has type 13, which is not known"),
        (HEAD + struct.pack("<IIQ", 9, 9, 1), "a field has type 9, which is not known"),
        (HEAD + struct.pack("<IIQ", 9, 4, 2**62), "values is longer than the file"),
        (HEAD + struct.pack("<IIQ", 9, 8, 2**62), "the file ends"),
        (HEAD + struct.pack("<IQ", 8, 2**63), "in the middle of a string"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    """Another format, another version or byte order, unknown types and absurd lengths."""
    with pytest.raises(ValueError, match=re.escape(message)):
        GgufFile(written(tmp_path, content))


def with_tensors(*tensors: bytes, alignment: int = 32) -> bytes:
    """Return a file with an alignment and these descriptions of tensors, without values."""
    key = b"general.alignment"
    field = struct.pack("<Q", len(key)) + key + struct.pack("<II", 4, alignment)
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1) + field + b"".join(tensors)


def tensor(kind: int, *sizes: int) -> bytes:
    """Return the description of a tensor named t at the first place."""
    sizes_written = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return struct.pack("<Q", 1) + b"t" + sizes_written + struct.pack("<IQ", kind, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (with_tensors(alignment=24), "general.alignment is 24, not a power of two"),
        (with_tensors(tensor(0, 0), tensor(0, 0)), "tensor t is there twice"),
        (with_tensors(tensor(999, 4)), "999 is not a valid GGMLQuantizationType"),
        (with_tensors(tensor(0, 2**40, 2**40)), "the file ends before tensor t does"),
        (with_tensors(tensor(8, 33)), "tensor t of shape (33,) is not made of whole blocks"),
    ],
)
def test_tensors_that_cannot_be_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    """Places, names, kinds and sizes are checked before a byte of a tensor is read."""
    with pytest.raises(ValueError, match=re.escape(message)):
        GgufFile(written(tmp_path, content))


def test_a_field_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Nobody guesses which of two values was meant."""
    field = struct.pack("<Q", 1) + b"k" + struct.pack("<II", 4, 7)
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * field
    with pytest.raises(ValueError, match="field k is there twice"):
        GgufFile(written(tmp_path, content))
