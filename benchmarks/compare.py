"""`make bench-peers`: ours through Redis against each peer, run by run, and the ratio of each pair.

    python -m benchmarks.compare [--quick] [--peers vllm,openvino] [--workloads mixed,single]

Every peer runs in an environment of its own, made on first use. What compares unlike with like is
said: ours has Redis in the loop, peers are called in process. They hand over whole answers, as ours
does in bulk; where ours streams, a client reads every token as it comes.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.alternate import alternate, say
from benchmarks.figures import gigabytes, milliseconds, ratio, summary
from benchmarks.options import Options, add_options, options_of
from benchmarks.store import load, save
from benchmarks.systems.registry import PEERS, SYSTEMS, RunFailed
from benchmarks.tables import print_table

WORKLOADS = ("mixed", "shared", "single")
SLOW_PEERS = {"transformers": 64, "padded": 64}  # most requests that are worth the wait
QUANTIZED_PEERS = ("openvino",)  # those with int8


def main() -> None:
    """Measure, print the ratios, keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_options(parser)
    parser.add_argument("--peers", default=",".join(PEERS), help="separated by commas")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="separated by commas")
    given = parser.parse_args()
    options = options_of(given)
    peers, workloads = given.peers.split(","), given.workloads.split(",")
    if unknown := sorted({*peers} - {*PEERS} | {*workloads} - {*WORKLOADS}):
        parser.error(f"unknown: {', '.join(unknown)}; peers are {PEERS}, workloads {WORKLOADS}")
    pairs: list[dict[str, Any]] = []
    kept = (load(_file_name(options)) or {"data": {"pairs": []}})["data"]["pairs"]
    for workload in workloads:
        for peer in peers:
            if options.quantization == "none" or peer in QUANTIZED_PEERS:
                pairs.append(compare(options, workload, peer))
                save(_file_name(options), options, {"pairs": renewed(kept, pairs)})
    print_table(HEADINGS, [row(pair) for pair in pairs])
    sys.exit(any("failed" in pair for pair in pairs))


def renewed(kept: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all pairs, those of earlier runs too where they were not measured again."""
    both = {(pair["workload"], pair["peer"]): pair for pair in (*kept, *pairs)}
    return list(both.values())


def compare(options: Options, workload: str, peer: str) -> dict[str, Any]:
    """Run ours, streamed and in bulk, and one peer in turn; a peer that cannot run says why."""
    count = _num_requests(options, workload, peer)
    about = {"workload": workload, "peer": peer, "num_requests": count}
    job = options.job(workload, count)
    names = ("redis", peer) if job.is_sequential else ("redis", peer, "bulk")
    try:
        results = alternate(names, job, options.num_rounds)
    except RunFailed as error:
        say(str(error))
        return {**about, "failed": str(error).splitlines()[0]}
    return {
        **about,
        "ours": summary(results["redis"]),
        "theirs": summary(results[peer]),
        "ratio": ratio(results["redis"], results[peer]),
        "bulk": summary(results["bulk"]) if "bulk" in results else None,
        "bulk_ratio": ratio(results["bulk"], results[peer]) if "bulk" in results else None,
    }


HEADINGS = (
    "workload",
    "system",
    "output tokens/s",
    "ours, streamed",
    "ratio",
    "in bulk",
    "ratio",
    "TTFT p50 (ours)",
    "TPOT p50 (ours)",
    "memory (ours)",
)


def row(pair: dict[str, Any]) -> list[str]:
    """Return one line of the table."""
    name = SYSTEMS[pair["peer"]].label
    if "failed" in pair:
        return [pair["workload"], name, pair["failed"], *[""] * (len(HEADINGS) - 3)]
    ours, theirs = pair["ours"], pair["theirs"]

    def both(form: Any, key: str) -> str:
        return f"{form(theirs[key])} ({form(ours[key])})"

    return [
        f"{pair['workload']}, {pair['num_requests']}",
        f"{name} {theirs['version'].partition(' ')[2]}",  # without the package's name
        f"{theirs['output_tokens_per_s']:.0f}",
        f"{ours['output_tokens_per_s']:.0f}",
        f"{pair['ratio']:.2f}",
        f"{pair['bulk']['output_tokens_per_s']:.0f}" if pair.get("bulk") else "–",
        f"{pair['bulk_ratio']:.2f}" if pair.get("bulk") else "–",
        both(milliseconds, "ttft_p50_s"),
        both(milliseconds, "tpot_p50_s"),
        both(gigabytes, "peak_rss_bytes"),
    ]


def _num_requests(options: Options, workload: str, peer: str) -> int:
    if workload == "single":
        return 2 if options.is_quick else 5
    return min(options.num_requests, SLOW_PEERS.get(peer, options.num_requests))


def _file_name(options: Options) -> str:
    return "peers" if options.quantization == "none" else f"peers-{options.quantization}"


if __name__ == "__main__":
    main()
