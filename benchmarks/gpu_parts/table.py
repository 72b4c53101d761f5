"""The figures of a GPU as rows of a table, shares of the measured limits worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.figures import milliseconds

Row = Sequence[str]
Data = dict[str, Any]
_UNITS = {"GB/s": 1e9, "TFLOP/s": 1e12}
Parts = dict[str, Data]
"""Results by part; one that failed has no ``data``."""


def gpu_rows(report: Data) -> list[Row]:
    """Return every part's figures, or its error, one a row."""
    parts: Parts = report["parts"]
    found = [row for name, result in parts.items() for row in _part(name, result, parts)]
    return [*found, ("all of it took", f"{report['seconds']:.0f} s")]


def failures(parts: Parts) -> list[str]:
    """Return the names of the parts that failed, or that found something computed wrongly."""
    return [name for name, result in parts.items() if "error" in result or _is_wrong(result)]


def _is_wrong(result: Data) -> bool:
    data = result["data"]
    if "runs" in data:
        return any(run.get("num_different") != 0 for run in data["runs"])
    judged = [*data.get("operations", ()), *data.get("cases", ())]
    return not all(case.get("is_ok", True) for case in judged)


def _part(name: str, result: Data, parts: Parts) -> Iterable[Row]:
    if "error" in result:
        return [(name, f"failed: {' '.join(result['error'].split())[:200]}")]
    kind = "engine" if name.startswith("engine ") else name
    return ((f"{name}: {what}", figure) for what, figure in _ROWS[kind](result["data"], parts))


def _limits(data: Data, parts: Parts) -> Iterator[Row]:
    memory_bytes = data["memory_bytes"]
    size = "" if memory_bytes is None else f", {memory_bytes / 2**30:.0f} GiB"
    versions = ", ".join(f"{name} {found}" for name, found in data["versions"].items())
    yield "device", f"{data['device']}{size}; {versions}"
    yield "copy, read and written", f"{data['copy_bytes_per_s'] / 1e9:,.1f} GB/s"
    yield f"product in {data['dtype']}", f"{data['product_flop_per_s'] / 1e12:,.3g} TFLOP/s"


def _attention(data: Data, parts: Parts) -> Iterator[Row]:
    for backend in dict.fromkeys(case["backend"] for case in data["cases"]):
        cases = [case for case in data["cases"] if case["backend"] == backend]
        yield f"{backend} against reference", _judged(cases, _name_of_case)
    for obstacle in data["obstacles"]:
        yield "cannot run here", obstacle
    yield from _left_out(data)


def _rows(data: Data, parts: Parts) -> Iterator[Row]:
    yield "triton against torch", _judged(data["operations"], lambda case: str(case["operation"]))


def _tokens(data: Data, parts: Parts) -> Iterator[Row]:
    for run in data["runs"]:
        on = " + ".join([run["backend"], *run["switches"]])
        yield on, run.get("failure") or f"{run['num_different']} of {data['num_ids']} ids differ"


def _decode(data: Data, parts: Parts) -> Iterator[Row]:
    for case in data["cases"]:
        yield _case(case), _share_of(case, "kv_bytes_per_s", "GB/s", parts)
    yield from _left_out(data)


def _prefill(data: Data, parts: Parts) -> Iterator[Row]:
    for case in data["cases"]:
        yield _case(case), _share_of(case, "flop_per_s", "TFLOP/s", parts)
    yield from _left_out(data)


def _engine(data: Data, parts: Parts) -> Iterator[Row]:
    done = f"{data['num_finished']} of {data['num_requests']} requests in {data['elapsed_s']:.1f} s"
    yield "throughput", f"{data['output_tokens_per_s']:,.0f} output tokens/s; {done}"
    plain = parts.get("engine plain", {}).get("data")
    if plain is not None and plain is not data:
        yield "first tokens as without", _agreement(data["answers"], plain["answers"])
    yield from _steady(data["steady"], parts)


def _large(data: Data, parts: Parts) -> Iterator[Row]:
    yield from _steady(data["steady"], parts)


def _transformers(data: Data, parts: Parts) -> Iterator[Row]:
    done = f"{data['num_finished']} of {data['num_requests']} requests in {data['elapsed_s']:.1f} s"
    yield data["version"], f"{data['output_tokens_per_s']:,.0f} output tokens/s; {done}"


def _steady(steady: Data, parts: Parts) -> Iterator[Row]:
    copy, product = (_limit(parts, f"{key}_per_s") for key in ("copy_bytes", "product_flop"))
    share = ""
    if copy and product:
        least_s = max(steady["read_bytes"] / copy, steady["flop"] / product)
        share = f", {100 * least_s / steady['step_s']:.0f} % of the roofline"
    what = f"step of {steady['num_seqs']} decodes, {steady['mean_keys']:,.0f} keys each"
    yield what, f"{milliseconds(steady['step_s'])}{share}"
    idle = steady["idle"]
    yield "GPU idle", idle if isinstance(idle, str) else f"{100 * idle:.1f} %"


def _judged(cases: list[Data], name: Callable[[Data], str]) -> str:
    """Say how many are right, and name those that are not."""
    wrong = [f"{name(case)} ({_why(case)})" for case in cases if not case["is_ok"]]
    largest = max((case.get("largest_error", 0.0) for case in cases), default=0.0)
    told = f"{len(cases) - len(wrong)} of {len(cases)} right, largest error {largest:.1e}"
    return f"{told}; wrong: {', '.join(wrong)}" if wrong else told


def _why(case: Data) -> str:
    return str(case.get("failure") or f"{case['largest_error']:.1e}")


def _name_of_case(case: Data) -> str:
    return f"{case['case']}, {case['dtype']}"


def _case(case: Data) -> str:
    return f"{case['model']}, {case['backend']}, {case['shares']}"


def _share_of(case: Data, rate: str, unit: str, parts: Parts) -> str:
    """Return a rate, and what part of the device's own it is."""
    if "failure" in case:
        return str(case["failure"])
    limit, limited_by = {
        "GB/s": (_limit(parts, "copy_bytes_per_s"), "the copy"),
        "TFLOP/s": (_limit(parts, "product_flop_per_s"), "the product"),
    }[unit]
    share = f", {100 * case[rate] / limit:.0f} % of {limited_by}" if limit else ""
    return (
        f"{case[rate] / _UNITS[unit]:,.3g} {unit}{share}, {1e6 * case['layer_s']:,.0f} µs a layer"
    )


def _agreement(answers: list[list[int]], others: list[list[int]]) -> str:
    """Count the tokens up to the first that differs; one such changes all that follow."""
    pairs = [list(zip(*pair, strict=False)) for pair in zip(answers, others, strict=True)]
    alike = sum(_num_alike(pair) for pair in pairs)
    return f"{alike} of {sum(map(len, pairs))}"


def _num_alike(pairs: list[tuple[int, int]]) -> int:
    return next((place for place, (a, b) in enumerate(pairs) if a != b), len(pairs))


def _left_out(data: Data) -> Iterator[Row]:
    if data["num_left_out"]:
        yield "left out for want of time", f"{data['num_left_out']} cases; see --seconds"


def _limit(parts: Parts, key: str) -> float | None:
    found = parts.get("limits", {}).get("data", {}).get(key)
    return None if found is None else float(found)


_ROWS: dict[str, Callable[[Data, Parts], Iterator[Row]]] = {
    "limits": _limits,
    "attention": _attention,
    "rows": _rows,
    "tokens": _tokens,
    "decode": _decode,
    "prefill": _prefill,
    "engine": _engine,
    "transformers": _transformers,
    "large step": _large,
}
