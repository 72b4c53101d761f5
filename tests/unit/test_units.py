"""Sizes and durations are read as people write them, and refused by name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigurationError
from headrace.units import format_bytes, format_duration, parse_bytes, parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("15s", 15.0),
        ("500ms", 0.5),
        ("250us", 0.00025),
        ("2m", 120.0),
        ("2min", 120.0),
        ("1.5h", 5400.0),
        ("7d", 604_800.0),
        ("15", 15.0),
        (" 15 s ", 15.0),
        (".5s", 0.5),
        ("0", 0.0),
    ],
)
def test_a_duration_is_seconds(text: str, seconds: float) -> None:
    """A number with a unit is a duration; a bare number is seconds."""
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512", 512),
        ("512B", 512),
        ("24MiB", 24 * 1024**2),
        ("24mib", 24 * 1024**2),
        ("24MB", 24_000_000),
        ("1.5GiB", 3 * 1024**3 // 2),
        ("1 kB", 1000),
        ("1KiB", 1024),
        ("2TiB", 2 * 1024**4),
        ("1.0001 kb", 1000),
    ],
)
def test_a_size_is_bytes(text: str, num_bytes: int) -> None:
    """Suffixes with an i are binary, without they are decimal, in any case."""
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1w", "1 2s", "nan", "inf", "1e3s", "٣s", "1m30s", "15S s"]
)
def test_what_is_no_duration_is_refused_by_name(text: str) -> None:
    """The error holds the text as it was given."""
    with pytest.raises(ConfigurationError) as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("text", ["", "MiB", "-1", "24M", "24Mi", "0x10", "1,5GB", "1e3", "infB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    """The error holds the text; a lone M is refused, since people mean two things by it."""
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0s"), (0.0005, "500us"), (0.5, "500ms"), (15.0, "15s"), (150.0, "2.5m"), (86400, "1d")],
)
def test_a_duration_is_written_short(seconds: float, text: str) -> None:
    """The largest unit that leaves a whole part is taken."""
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0B"), (512, "512B"), (24 * 1024**2, "24MiB"), (3 * 1024**3 // 2, "1.5GiB")],
)
def test_a_size_is_written_short(num_bytes: int, text: str) -> None:
    """Sizes are written in binary units."""
    assert format_bytes(num_bytes) == text


@given(st.floats(min_value=1e-5, max_value=1e7))
def test_a_written_duration_is_read_back(seconds: float) -> None:
    """Reading what was written is right to about three digits."""
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.01)


@given(st.integers(min_value=0, max_value=2**45))
def test_a_written_size_is_read_back(num_bytes: int) -> None:
    """Reading what was written is right to about three digits."""
    assert parse_bytes(format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=0.01)
