"""Structured logs: every event has a constant name, facts are keys, and no text of users is logged.

One line is one JSON object, or a coloured line where a person watches. Prompt and output text are
never logged; passwords inside URLs are cut out.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Literal, TextIO

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]

# The names of events. Reported at level info:
WORKER_STARTED = "worker.started"
WORKER_DRAINING = "worker.draining"
WORKER_STOPPED = "worker.stopped"
MODEL_LOADED = "model.loaded"
KV_CACHE_ALLOCATED = "kv_cache.allocated"
KERNELS_BUILT = "kernels.built"  # the first start on a machine takes as long as the compiler does
REDIS_RECONNECTED = "redis.reconnected"
REQUEST_FINISHED = "request.finished"  # the canonical line: enough to answer "why was it slow?"
# warning:
REDIS_DISCONNECTED = "redis.disconnected"
LANE_SKIPPED = "lane.skipped"
KERNELS_MISSING = "kernels.missing"  # a CPU runs slower than it could
REDIS_UNSAFE = "redis.unsafe"  # its settings may lose requests
DELIVERY_RECLAIMED = "delivery.reclaimed"
REQUEST_REJECTED = "request.rejected"
REQUEST_CANCELLED = "request.cancelled"
REQUEST_DROPPED = "request.dropped"  # no longer ours: another worker holds it, or it is gone
SEQUENCE_PREEMPTED = "sequence.preempted"  # the first time for a request
READER_SLOW = "reader.slow"
STREAM_ROLLED_BACK = "stream.rolled_back"  # Redis lost tokens that it had acknowledged
# error:
REQUEST_FAILED = "request.failed"
REQUEST_DEAD_LETTERED = "request.dead_lettered"
ENGINE_STEP_FAILED = "engine.step_failed"
ENGINE_STALLED = "engine.stalled"
# debug:
REQUEST_RECEIVED = "request.received"
REQUEST_ADMITTED = "request.admitted"
REQUEST_FIRST_TOKEN = "request.first_token"
ENGINE_STEPPED = "engine.stepped"

_PASSWORD = re.compile(r"(\w://[^\s/@:]*:)\S+@")  # it may hold an @ itself
_PASSWORD_OPTION = re.compile(r"(password=)[^\s&]+")


def configure_logs(
    level: LogLevel = "info", log_format: LogFormat = "auto", stream: TextIO | None = None
) -> None:
    """Set logging up for the whole process, libraries included; once, at its start."""
    stream = stream or sys.stderr
    number = logging.getLevelNamesMapping()[level.upper()]
    steps = _shared_steps()
    render = _renderer(log_format, stream)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *steps, render],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    _configure_libraries(steps, render, stream)


def get_logger(**facts: object) -> FilteringBoundLogger:
    """Return a logger with facts bound: ``worker_id`` and ``model``, ``request_id`` and so on."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger.bind(**facts) if facts else logger


def without_password(url: str) -> str:
    """Return the URL with its password replaced by ``***``."""
    return _PASSWORD_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1***@", url))


def _shared_steps() -> list[Processor]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _cut_passwords,
    ]


def _renderer(log_format: LogFormat, stream: TextIO) -> Processor:
    if log_format == "json" or (log_format == "auto" and not stream.isatty()):
        return structlog.processors.JSONRenderer()
    return structlog.dev.ConsoleRenderer(colors=stream.isatty())


def _configure_libraries(steps: list[Processor], render: Processor, stream: TextIO) -> None:
    """Give what libraries log through the standard module the same form."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[structlog.stdlib.add_logger_name, *steps],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)


def _cut_passwords(_logger: WrappedLogger, _method: str, event_dict: EventDict) -> EventDict:
    for key, value in event_dict.items():
        if isinstance(value, str) and "://" in value:
            event_dict[key] = without_password(value)
    return event_dict
