"""Numbers from runs: percentiles, medians, ratios of pairs, and how they are written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.job import Result


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share in [0, 1] of them lies; raises ValueError for none."""
    if not values:
        raise ValueError("a percentile of nothing")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return the medians of several runs of one system, as they go into JSON."""
    ttft_s = [value for result in results for value in result.ttft_s]
    tpot_s = [value for result in results for value in result.tpot_s]
    return {
        "system": results[0].system,
        "version": results[0].version,
        "output_tokens_per_s": statistics.median(r.output_tokens_per_s for r in results),
        "all_output_tokens_per_s": [r.output_tokens_per_s for r in results],
        "ttft_p50_s": percentile(ttft_s, 0.5),
        "ttft_p99_s": percentile(ttft_s, 0.99),
        "tpot_p50_s": percentile(tpot_s, 0.5) if tpot_s else None,
        "tpot_p99_s": percentile(tpot_s, 0.99) if tpot_s else None,
        "ttft_s": results[-1].ttft_s,
        "tpot_s": results[-1].tpot_s,
        "peak_rss_bytes": statistics.median(r.peak_rss_bytes for r in results),
        "num_requests": len(results[0].ttft_s),
        "num_prompt_tokens": results[0].num_prompt_tokens,
        "num_output_tokens": results[0].num_output_tokens,
    }


def ratio(ours: Sequence[Result], others: Sequence[Result]) -> float:
    """Return the median, over pairs of neighbouring runs, of our throughput over the other's."""
    pairs = zip(ours, others, strict=True)
    return statistics.median(a.output_tokens_per_s / b.output_tokens_per_s for a, b in pairs)


def milliseconds(seconds: float | None) -> str:
    """Return a time as text: three digits that count, or a dash for none."""
    if seconds is None:
        return "–"
    value = seconds * 1000
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def gigabytes(num_bytes: float) -> str:
    """Return a size in GB as text."""
    return f"{num_bytes / 1e9:.1f} GB"
