"""Every system that can be measured: its name, how a run of it is started, and with which model."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.job import Job, Result
from benchmarks.peers import environments
from benchmarks.peers.environments import Environment
from headrace_worker.engine.environment import engine_environment

_ROOT = Path(__file__).parents[2]
_LOG_END_CHARS = 2000


class RunFailed(RuntimeError):
    """A run ended without a result; the message is the end of what it said."""


def _own_model(job: Job) -> str:
    return job.model


def _safetensors(job: Job) -> str:
    return str(environments.safetensors_model(job.model, job.dtype))


def _openvino(job: Job) -> str:
    return str(environments.openvino_model(job.model, job.dtype, job.quantization))


@dataclass(frozen=True, slots=True)
class System:
    """One way to answer a workload."""

    label: str
    module: str
    arguments: tuple[str, ...] = ()  # after job and result
    environment: Environment | None = None  # None: the one that runs the benchmark
    find_model: Callable[[Job], str] = _own_model

    def prepare(self, job: Job) -> None:
        """Install and convert what a run needs, so that no run waits for it."""
        if self.environment is not None:
            self.environment.install()
        self.find_model(job)

    def run(self, job: Job) -> Result:
        """Run it once, in a process of its own; raises RunFailed."""
        python = str(self.environment.python) if self.environment else sys.executable
        with tempfile.TemporaryDirectory() as name:
            job_file, result_file = Path(name) / "job.json", Path(name) / "result.json"
            replace(job, model=self.find_model(job)).write(job_file)
            command = [python, "-m", self.module, str(job_file), str(result_file), *self.arguments]
            done = subprocess.run(
                command,
                cwd=_ROOT,
                env={**os.environ, **_variables(self, job)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            if done.returncode != 0:
                said = done.stdout.decode("utf-8", "replace")[-_LOG_END_CHARS:]
                raise RunFailed(f"{self.label} ended with {done.returncode}:\n{said}")
            return Result.read(result_file)


SYSTEMS = {
    "engine": System("engine alone", "benchmarks.systems.engine"),
    "static": System("static batches", "benchmarks.systems.engine", ("--static",)),
    "timed": System("engine, timed", "benchmarks.systems.timed"),
    "disturbed": System("disturbed decodes", "benchmarks.systems.disturbed"),
    "redis": System("through Redis", "benchmarks.systems.redis"),
    "bulk": System("through Redis, in bulk", "benchmarks.systems.redis", ("--bulk",)),
    "redis-2": System("through Redis, two workers", "benchmarks.systems.redis", ("--workers", "2")),
    "vllm": System(
        "vLLM",
        "benchmarks.peers.vllm",
        environment=environments.VLLM,
        find_model=_safetensors,
    ),
    "openvino": System(
        "OpenVINO GenAI",
        "benchmarks.peers.openvino",
        environment=environments.OPENVINO,
        find_model=_openvino,
    ),
    "transformers": System(
        "transformers, continuous batching",
        "benchmarks.peers.transformers_continuous",
        environment=environments.TRANSFORMERS,
        find_model=_safetensors,
    ),
    "padded": System(
        "transformers, padded generate",
        "benchmarks.peers.transformers_padded",
        environment=environments.TRANSFORMERS,
        find_model=_safetensors,
    ),
}
PEERS = ("vllm", "openvino", "transformers", "padded")


def _variables(system: System, job: Job) -> Mapping[str, str]:
    """Return what a run finds in its environment; ours gets what a worker gives its engine."""
    if system.environment is None:
        return engine_environment()
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(job.num_threads)}
    preloads = environments.preloads() if system.environment is environments.VLLM else ""
    return {**offline, **({"LD_PRELOAD": preloads} if preloads else {})}
