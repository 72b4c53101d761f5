"""From a job to the flags of a worker, so that every way of running ours has the same settings."""

from __future__ import annotations

from benchmarks.job import Job
from headrace_worker.catalogue import resolve
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.options import parse
from headrace_worker.serving.tokenizer_store import load_tokenizer
from headrace_worker.wiring import engine_settings

_NO_SERVER = "unix:///nobody-connects-to-it"


def worker_flags(job: Job) -> list[str]:
    """Return the flags; those that the job adds come last and so win."""
    values = {
        "--model": job.model,
        "--dtype": job.dtype,
        "--quantization": job.quantization,
        "--kv-cache-memory": str(job.kv_cache_bytes),
        "--max-num-seqs": str(job.max_num_seqs),
    }
    return [word for pair in values.items() for word in pair] + job.worker_flags


def settings_of(job: Job) -> EngineSettings:
    """Return what a worker with these flags tells its engine."""
    settings = parse(["--redis-url", _NO_SERVER, *worker_flags(job)])
    path = resolve(settings.model)
    return engine_settings(settings, path, load_tokenizer(path))
