"""The figures of each section as rows, for the terminal and for the document alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.figures import gigabytes, milliseconds
from benchmarks.gpu_parts.table import gpu_rows

Row = Sequence[str]
HEADINGS = ("what", "figure")


def print_table(headings: Row, rows: Sequence[Row]) -> None:
    """Print rows in columns."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for row in (headings, *rows):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    print()


def markdown(headings: Row, rows: Sequence[Row]) -> str:
    """Return rows as a Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows_of(section: str, data: dict[str, Any]) -> list[Row]:
    """Return a section's figures, one a row."""
    return _ROWS[section](data)


def _throughput(data: dict[str, Any]) -> list[Row]:
    engine, redis = data["engine"], data["redis"]
    return [
        *_shared(data),
        ("TTFT p50 · p99, through Redis", _pair(redis, "ttft")),
        ("TPOT p50 · p99, through Redis", _pair(redis, "tpot")),
        ("peak memory: engine alone", gigabytes(engine["peak_rss_bytes"])),
        ("peak memory: worker, both processes", gigabytes(redis["peak_rss_bytes"])),
        ("CPU time of the asyncio side", f"{data['transport_cpu_s']:.2f} s"),
    ]


def _step(data: dict[str, Any]) -> list[Row]:
    split_s = data["split_s"]
    total_s = sum(split_s.values())
    return [(name, f"{100 * s / total_s:.1f} %, {s:.2f} s") for name, s in split_s.items()]


def _static(data: dict[str, Any]) -> list[Row]:
    static, continuous = data["static"], data["continuous"]
    return [
        ("static batches", _rate(static)),
        ("continuous", _rate(continuous)),
        ("continuous ÷ static", f"{data['gain']:.2f}"),
        ("slot use, static", f"{100 * static['slot_use']:.0f} %"),
        ("slot use, continuous", f"{100 * continuous['slot_use']:.0f} %"),
    ]


def _single(data: dict[str, Any]) -> list[Row]:
    return [
        (f"{key.upper()} p50, {label}", milliseconds(data[name][f"{key}_p50_s"]))
        for key in ("ttft", "tpot")
        for name, label in (("engine", "engine alone"), ("redis", "through Redis"))
    ]


def _shared(data: dict[str, Any]) -> list[Row]:
    return [
        ("engine alone", _rate(data["engine"])),
        ("through Redis, every token streamed", _rate(data["redis"])),
        ("through Redis, in bulk", _rate(data["bulk"])),
        ("streamed ÷ engine alone", f"{data['ratio']:.3f}"),
        ("in bulk ÷ engine alone", f"{data['bulk_ratio']:.3f}"),
    ]


def _bursty(data: dict[str, Any]) -> list[Row]:
    redis = data["redis"]
    return [
        ("through Redis", _rate(redis)),
        ("TTFT p50 · p99", _pair(redis, "ttft")),
        ("TPOT p50 · p99", _pair(redis, "tpot")),
    ]


def _long(data: dict[str, Any]) -> list[Row]:
    engine = data["engine"]
    num_tokens = engine["num_prompt_tokens"] + engine["num_output_tokens"]
    elapsed_s = engine["num_output_tokens"] / engine["output_tokens_per_s"]
    return [
        ("engine alone, output", _rate(engine)),
        ("engine alone, prompt and output", f"{num_tokens / elapsed_s:,.0f} tokens/s"),
    ]


def _chunking(data: dict[str, Any]) -> list[Row]:
    rows: list[Row] = []
    for one in data["budgets"]:
        name = f"budget {one['budget']}" + ("" if one["is_chunked"] else ", no chunks")
        before, during = milliseconds(one["before_p99_s"]), milliseconds(one["during_p99_s"])
        text = f"{before} → {during} ({one['rise']:.1f} ×); prompt {one['long_ttft_s']:.2f} s"
        rows.append((f"{name}: TPOT p99 of {one['num_decodes']} decodes", text))
    return rows


def _requests(data: dict[str, Any]) -> list[Row]:
    first = data["points"][0]["total_tokens_per_s"]
    return [
        (
            f"{one['at']:,} requests",
            f"{one['total_tokens_per_s']:,.0f} tokens/s, prompt and output"
            f" ({one['total_tokens_per_s'] / first:.2f} of the first)",
        )
        for one in data["points"]
    ]


def _by(unit: str) -> Callable[[dict[str, Any]], list[Row]]:
    def rows(data: dict[str, Any]) -> list[Row]:
        return [
            (
                f"{one['at']:,} {unit}",
                f"{one['output_tokens_per_s']:,.1f} output tokens/s,"
                f" {one['total_tokens_per_s']:,.0f} with the prompts",
            )
            for one in data["points"]
        ]

    return rows


def _queue(data: dict[str, Any]) -> list[Row]:
    return [
        (
            f"{one['num_workers']} workers",
            f"{one['claims_per_s']:,.0f} claims/s; Redis {one['redis_cpu_us']:.0f} µs a request"
            f" ({100 * one['redis_use']:.0f} % of a core), workers {one['worker_cpu_us']:.0f} µs",
        )
        for one in data["points"]
    ]


def _roofline(data: dict[str, Any]) -> list[Row]:
    rows: list[Row] = [
        (f"{kind} products, {count} rows", f"{rate / 1e9:,.0f} {unit}")
        for kind, unit in (("bfloat16", "GFLOP/s"), ("int8", "GOP/s"))
        for count, rate in data[f"{kind}_{'flop' if kind == 'bfloat16' else 'op'}_per_s"].items()
    ]
    rows.append(("copy, read and written", f"{data['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s"))
    rows.append(("a lone decode reads its weights in", milliseconds(data["lone_decode_s"])))
    for name, limit in data["limits"].items():
        for kind in ("bfloat16", "int8"):
            text = f"{limit[f'{kind}_products_tokens_per_s']:,.0f} products alone,"
            text += f" {limit[f'{kind}_tokens_per_s']:,.0f} with reads of the KV cache"
            rows.append((f"{name}, output tokens/s in {kind}", text))
    return rows


_ROWS: dict[str, Callable[[dict[str, Any]], list[Row]]] = {
    "throughput": _throughput,
    "step": _step,
    "static": _static,
    "single": _single,
    "shared": _shared,
    "bursty": _bursty,
    "long": _long,
    "chunking": _chunking,
    "num_requests": _requests,
    "prompt_length": _by("prompt tokens"),
    "num_workers": _by("workers, threads shared out"),
    "queue": _queue,
    "roofline": _roofline,
    "gpu": gpu_rows,
}


def _rate(system: dict[str, Any]) -> str:
    rates = system["all_output_tokens_per_s"]
    spread = f" ({min(rates):.0f} to {max(rates):.0f})" if len(rates) > 1 else ""
    return f"{system['output_tokens_per_s']:.1f} output tokens/s{spread}"


def _pair(system: dict[str, Any], key: str) -> str:
    return f"{milliseconds(system[f'{key}_p50_s'])} · {milliseconds(system[f'{key}_p99_s'])}"
