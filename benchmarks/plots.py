"""The plots of docs/performance.md, from the figures under build/bench; matplotlib draws them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl

from benchmarks.store import FOLDER, load
from benchmarks.systems.registry import SYSTEMS

mpl.use("svg")

from matplotlib import pyplot

_SIZE_INCHES = (6.4, 3.2)
# Text stays text and ids stay the same, so a plot that did not change is the same file.
_STYLE: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "headrace", "font.size": 9.0}
Draw = Callable[[Any, dict[str, Any]], None]


def draw_all(images: Path, folder: Path = FOLDER) -> list[Path]:
    """Draw every plot whose section was measured; return the files written."""
    images.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (section, draw) in PLOTS.items():
        if (kept := load(section, folder)) is not None:
            written.append(images / f"{name}.svg")
            _draw(written[-1], draw, kept["data"])
    return written


def _draw(file: Path, draw: Draw, data: dict[str, Any]) -> None:
    with mpl.rc_context(_STYLE):
        figure, axes = pyplot.subplots(figsize=_SIZE_INCHES, layout="constrained")
        draw(axes, data)
        figure.savefig(file, metadata={"Date": None})
        pyplot.close(figure)


def _peers(axes: Any, data: dict[str, Any]) -> None:
    pairs = [p for p in data["pairs"] if p["workload"] == "mixed" and "failed" not in p]
    labels = [SYSTEMS[pair["peer"]].label for pair in pairs]
    places = range(len(pairs))
    theirs = [pair["theirs"]["output_tokens_per_s"] for pair in pairs]
    ours = [pair["ours"]["output_tokens_per_s"] for pair in pairs]
    axes.barh([p + 0.2 for p in places], ours, 0.4, label="Headrace, through Redis")
    axes.barh([p - 0.2 for p in places], theirs, 0.4, label="peer")
    axes.set_yticks(list(places), labels)
    axes.set_xlabel("output tokens/s, mixed workload")
    axes.legend()


def _latencies(key: str, label: str) -> Draw:
    def draw(axes: Any, data: dict[str, Any]) -> None:
        pairs = [p for p in data["pairs"] if p["workload"] == "mixed" and "failed" not in p]
        if pairs:
            _distribution(axes, pairs[0]["ours"][key], "Headrace, through Redis")
        for pair in pairs:
            _distribution(axes, pair["theirs"][key], SYSTEMS[pair["peer"]].label)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        axes.set_ylabel("share of requests")
        axes.legend()

    return draw


def _distribution(axes: Any, values: list[float], label: str) -> None:
    ordered = sorted(1000 * value for value in values)
    shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
    axes.plot(ordered, shares, label=label)


def _slots(axes: Any, data: dict[str, Any]) -> None:
    for name in ("static", "continuous"):
        ends, slots = zip(*data[name]["slots_over_time"], strict=True)
        use = f"{100 * data[name]['slot_use']:.0f} % in use"
        axes.step(ends, slots, where="pre", label=f"{name}: {use}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("sequences in a step")
    axes.legend()


def _chunking(axes: Any, data: dict[str, Any]) -> None:
    for one in data["budgets"]:
        start = max(0, one["num_before"] - 10)
        steps = [1000 * value for value in one["step_s"][start:]]
        chunks = "" if one["is_chunked"] else ", no chunks"
        axes.plot(range(len(steps)), steps, marker=".", label=f"budget {one['budget']}{chunks}")
    axes.set_yscale("log")
    axes.set_xlabel("steps; the prompt arrives at 10")
    axes.set_ylabel("ms between two tokens")
    axes.legend()


def _by(label: str, key: str, unit: str) -> Draw:
    def draw(axes: Any, data: dict[str, Any]) -> None:
        points = [(one["at"], one[key]) for one in data["points"]]
        axes.plot(*zip(*points, strict=True), marker="o")
        axes.set_xscale("log", base=2)
        axes.set_xticks([at for at, _ in points], [f"{at:,}" for at, _ in points])
        axes.set_ylim(bottom=0)
        axes.set_xlabel(label)
        axes.set_ylabel(unit)

    return draw


def _queue(axes: Any, data: dict[str, Any]) -> None:
    points = [(one["num_workers"], one["claims_per_s"]) for one in data["points"]]
    axes.plot(*zip(*points, strict=True), marker="o", label="measured")
    limit = 1e6 / min(one["redis_cpu_us"] for one in data["points"])
    axes.axhline(limit, linestyle="--", label="where one core of Redis ends")
    axes.set_xticks([count for count, _ in points])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("workers with an engine that computes nothing")
    axes.set_ylabel("claims/s")
    axes.legend()


PLOTS: dict[str, tuple[str, Draw]] = {  # by file name: the section, and who draws it
    "throughput": ("peers", _peers),
    "ttft": ("peers", _latencies("ttft_s", "ms to the first token, mixed workload")),
    "tpot": ("peers", _latencies("tpot_s", "ms a token, mixed workload")),
    "slots": ("static", _slots),
    "chunking": ("chunking", _chunking),
    "num-requests": (
        "num_requests",
        _by("requests", "total_tokens_per_s", "tokens/s, prompts included"),
    ),
    "prompt-length": (
        "prompt_length",
        _by("prompt tokens", "total_tokens_per_s", "tokens/s, prompts included"),
    ),
    "num-workers": ("num_workers", _by("workers", "output_tokens_per_s", "output tokens/s")),
    "queue": ("queue", _queue),
}
