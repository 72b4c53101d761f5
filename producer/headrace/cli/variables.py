"""Every HEADRACE_* variable that somebody reads, so that a misspelt one is never just ignored."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from headrace.cli.options import PREFIX
from headrace.errors import ConfigurationError


def _named(*names: str) -> frozenset[str]:
    return frozenset(PREFIX + name for name in names)


# Variables that mean something to a command only; a worker refuses what it does not know.
COMMAND_VARIABLES = _named(
    *("RAW", "SYSTEM", "MAX_TOKENS", "TEMPERATURE", "TOP_P", "TOP_K", "MIN_P", "SEED", "STOP"),
    *("PRIORITY", "TTL", "TENANT", "TIMEOUT", "REQUEST_ID", "AFTER", "COUNT", "ALL", "JSON"),
    *("INCLUDE_STOP", "BAD_WORD", "ECHO", "JSON_SCHEMA", "REGEX", "CHOICE"),
    *("INPUT", "OUTPUT", "MAX_IN_FLIGHT", "PROMPTS", "QUIET", "USER", "ACL_PASSWORD"),
    # Given to the worker as flags, which win; as variables they would only be said twice.
    *("REDIS_URL", "QUEUE", "MODEL"),
)

# The worker's settings. The command never imports the worker; a test holds the two together.
WORKER_VARIABLES = _named(
    *("REDIS_URL", "QUEUE", "MODEL", "SERVED_MODEL_NAME", "WORKER_ID", "DEVICE", "DTYPE"),
    *("QUANTIZATION", "ATTENTION_BACKEND", "MAX_MODEL_LEN", "MAX_NUM_SEQS", "RESERVE"),
    *("MAX_NUM_BATCHED_TOKENS", "KV_CACHE_MEMORY", "GPU_MEMORY_UTILIZATION", "BLOCK_SIZE"),
    *("ENABLE_PREFIX_CACHING", "NUM_THREADS", "ENGINE_HANG_TIMEOUT", "ENGINE_COMMAND"),
    *("LEASE_TTL", "MAX_STRIKES", "DRAIN_TIMEOUT", "EXIT_WHEN_EMPTY", "FLUSH_INTERVAL"),
    *("FLUSH_TOKENS", "MAX_UNSENT_TOKENS", "METRICS_PORT", "METRICS_HOST", "LOG_LEVEL"),
    *("LOG_FORMAT", "MODEL_IMPL", "TENSOR_PARALLEL_SIZE", "ENFORCE_EAGER", "ASYNC_SCHEDULING"),
)

SHARED_VARIABLES = _named(
    *("CACHE_DIR", "STATE_DIR", "KERNELS"),
    *("QUEUE_MEMORY", "ACL_FILE", "QUEUE_URL", "BACKEND_URL"),  # of compose.yaml
)


def check_variables(environ: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigurationError that names each unknown variable and the nearest known one."""
    known = COMMAND_VARIABLES | WORKER_VARIABLES | SHARED_VARIABLES
    problems = []
    for name in sorted(environ):
        if name.startswith(PREFIX) and name not in known:
            (nearest,) = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            problems.append(f"{name}: no such variable; the nearest is {nearest}")
    if problems:
        raise ConfigurationError("\n".join(problems))
