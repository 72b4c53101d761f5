"""What a measured system is asked to do, and what it says it did; both travel as JSON.

Standard library only: peers read and write them in environments of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.workload import Item


@dataclass(frozen=True, slots=True)
class Job:
    """One run of one workload by one system."""

    model: str  # what --model takes; for peers, a folder of safetensors
    workload: str  # its name
    items: list[Item]
    warm_up: list[Item]  # run before, not measured
    is_sequential: bool = False  # each is sent when the last has ended
    dtype: str = "bfloat16"
    quantization: str = "none"  # none, int8
    num_threads: int = 2  # of peers; ours are told by a flag, or take their default
    kv_cache_bytes: int = 1024**3  # the same for everybody
    max_num_seqs: int = 256  # ours; peers keep their own default
    worker_flags: list[str] = field(default_factory=list)  # ours, added to those above

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Job:
        """Return what ``write`` wrote."""
        fields = json.loads(path.read_text("utf-8"))
        for name in ("items", "warm_up"):
            fields[name] = [Item(**item) for item in fields[name]]
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run."""

    system: str
    version: str  # of the system and what it computes with
    elapsed_s: float  # from the first request to the last token
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_s: list[float]  # from arrival to first token, queueing included; one a request
    tpot_s: list[float]  # mean time between tokens; one for each request of two tokens or more
    peak_rss_bytes: int  # of all processes that compute and hold requests
    details: dict[str, Any] = field(default_factory=dict)  # what only this system knows

    @property
    def output_tokens_per_s(self) -> float:
        """Throughput."""
        return self.num_output_tokens / self.elapsed_s

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self)), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Result:
        """Return what ``write`` wrote."""
        return cls(**json.loads(path.read_text("utf-8")))


@dataclass(slots=True)
class TokenTimes:
    """When one request arrived and when its tokens came, on one clock; it grows by each token."""

    arrived_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0

    def saw(self, now_s: float, num_tokens: int = 1) -> None:
        """Note that tokens have come."""
        if self.first_s is None:
            self.first_s = now_s
        self.last_s = now_s
        self.num_tokens += num_tokens

    @property
    def ttft_s(self) -> float:
        """Time to first token; raises ValueError where none came."""
        if self.first_s is None:
            raise ValueError("a request ended without a token")
        return self.first_s - self.arrived_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens, or None for fewer than two."""
        if self.first_s is None or self.last_s is None or self.num_tokens < 2:
            return None
        return (self.last_s - self.first_s) / (self.num_tokens - 1)


def summarize(
    job: Job,
    times: list[TokenTimes],
    *,
    system: str,
    version: str,
    elapsed_s: float,
    peak_rss_bytes: int,
    details: dict[str, Any] | None = None,
) -> Result:
    """Return the result of a run; raises ValueError unless every request got all its tokens."""
    for item, got in zip(job.items, times, strict=True):
        if got.num_tokens != item.num_output_tokens:
            raise ValueError(f"{got.num_tokens} tokens came, not {item.num_output_tokens}")
    return Result(
        system=system,
        version=version,
        elapsed_s=elapsed_s,
        num_prompt_tokens=sum(len(item.prompt) for item in job.items),
        num_output_tokens=sum(got.num_tokens for got in times),
        ttft_s=[got.ttft_s for got in times],
        tpot_s=[tpot for got in times if (tpot := got.tpot_s) is not None],
        peak_rss_bytes=peak_rss_bytes,
        details=details or {},
    )


def run_as_child(arguments: list[str], measure: Callable[[Job], Result]) -> None:
    """Be the process of one run: ``python -m benchmarks.… JOB RESULT``."""
    job_file, result_file = map(Path, arguments)
    measure(Job.read(job_file)).write(result_file)
