"""The worker's settings: flags, else environment variables, else defaults; checked before any I/O.

Every field is a flag ``--lease-ttl`` and a variable ``HEADRACE_LEASE_TTL``, and its description is
the flag's help. Sizes take suffixes (``24MiB``), durations too (``15s``).
"""

from __future__ import annotations

import platform
import re
import secrets
import shlex
from pathlib import PurePath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from headrace.keys import Keys
from headrace.redis_url import RedisUrl
from headrace.units import parse_bytes, parse_duration
from headrace_worker.logs import LogFormat, LogLevel, without_password

PREFIX = "HEADRACE_"

_DEVICE = r"auto|cpu|cuda(:\d+)?"


def _parsed(parse: Any) -> BeforeValidator:
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


def _check_redis_url(url: SecretStr) -> SecretStr:
    RedisUrl.parse(url.get_secret_value())  # raises for what redis-py could not use
    return url


def _check_queue(queue: str) -> str:
    return Keys(queue).queue  # raises for a name that cannot be part of a key


def _default_worker_id() -> str:
    """Unique for each process, also in a container that is started again under its old name."""
    host = re.sub(r"[^A-Za-z0-9._-]", "-", platform.node())[:48] or "worker"
    return f"{host}-{secrets.token_hex(4)}"


Seconds = Annotated[float, _parsed(parse_duration), Field(ge=0)]
Bytes = Annotated[int, _parsed(parse_bytes), Field(ge=1)]
Count = Annotated[int, Field(ge=1)]
Command = Annotated[tuple[str, ...], NoDecode, _parsed(lambda text: tuple(shlex.split(text)))]


class WorkerSettings(BaseSettings):
    """Everything that can be set; frozen. ``load_settings`` makes it and reports what is wrong."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
        frozen=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    redis_url: Annotated[SecretStr, AfterValidator(_check_redis_url)] = Field(
        description="where the queue lives: redis://, rediss://, unix:// or redis+sentinel://"
    )
    queue: Annotated[str, AfterValidator(_check_queue)] = Field(
        "default", description="name of the queue"
    )
    model: str = Field(
        min_length=1,
        description="a pulled name, a folder of safetensors, a .gguf file or a hub id",
    )
    served_model_name: str | None = Field(
        None, min_length=1, description="name that requests may ask for; else that of the files"
    )
    worker_id: str = Field(
        default_factory=_default_worker_id,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="unique name of this worker; else a random one",
    )

    device: str = Field("auto", pattern=rf"^({_DEVICE})$", description="auto, cpu, cuda, cuda:1")
    tensor_parallel_size: Count = Field(
        1, description="GPUs that the model is cut over; on a CPU, processes"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of weights and KV cache"
    )
    model_impl: Literal["auto", "native", "transformers"] = Field(
        "auto", description="whose model code runs: auto is native where there is such"
    )
    quantization: Literal["none", "int8", "fp8"] = Field(
        "none", description="none: weights in dtype; int8 or, on a GPU, fp8: in eight bits"
    )
    attention_backend: str | None = Field(None, description="else the best that is available")
    max_model_len: Annotated[int, Field(ge=2)] | None = Field(
        None, description="context in tokens, prompt and output; else the model's own"
    )
    max_num_seqs: Count = Field(
        256, description="most sequences in a step; else as many as its token budget at most"
    )
    max_num_batched_tokens: Count = Field(512, description="token budget of a step")
    kv_cache_memory: Bytes | None = Field(
        None, description="size of the KV cache; else from what is free"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of the GPU's memory to use, everything counted"
    )
    block_size: Count | None = Field(
        None, description="tokens in a KV block; else what the attention backend prefers"
    )
    reserve: Literal["expected", "worst"] = Field(
        "expected", description="room that a request must find; worst never preempts"
    )
    enable_prefix_caching: bool = Field(True, description="share KV blocks of equal prefixes")
    enforce_eager: bool = Field(False, description="on a GPU, run decodes without CUDA graphs")
    async_scheduling: bool = Field(
        True, description="on a GPU, schedule a step while the one before it runs"
    )
    num_threads: Count | None = Field(None, description="CPU threads of the engine")
    engine_hang_timeout: Seconds = Field(
        60.0, gt=0, description="silence after which a busy engine is killed"
    )
    engine_command: Command = Field((), description="another engine process", exclude=True)

    lease_ttl: Seconds = Field(
        15.0, ge=1, description="time after which a silent worker's requests go to others"
    )
    max_strikes: Count = Field(
        3, description="workers a request may take down before it is a dead letter"
    )
    drain_timeout: Seconds = Field(
        0.0, description="time to finish requests after SIGTERM; the rest goes to others"
    )
    exit_when_empty: bool = Field(False, description="exit 0 once the queue is empty")
    flush_interval: Seconds = Field(
        0.05, description="longest wait of a token to be sent with others"
    )
    flush_tokens: Count = Field(
        8, description="waiting tokens of a request that are sent without delay"
    )
    max_unsent_tokens: Count = Field(
        16384, description="tokens not acknowledged by Redis at which the engine pauses"
    )

    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="port of /metrics, /healthz and /readyz; 0: any; absent: none"
    )
    metrics_host: str = Field("127.0.0.1", description="address of these pages")
    log_level: LogLevel = Field("info", description="lowest level that is logged")
    log_format: LogFormat = Field("auto", description="auto is console on a terminal, else json")

    @property
    def model_name(self) -> str:
        """What requests may call the model."""
        path = PurePath(self.model)
        files = path.stem if path.suffix == ".gguf" else path.name
        # A hub id keeps its owner; it looks like a relative path of two parts.
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", self.model) and path.suffix != ".gguf"
        return self.served_model_name or (self.model if is_hub_id else files)

    @property
    def redis_address(self) -> str:
        """The URL without its password, for logs."""
        return without_password(self.redis_url.get_secret_value())

    @model_validator(mode="after")
    def _check_together(self) -> WorkerSettings:
        if "max_num_seqs" not in self.model_fields_set:
            most = min(self.max_num_seqs, self.max_num_batched_tokens)
            object.__setattr__(self, "max_num_seqs", most)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs"
                f" {self.max_num_seqs}: some sequences would never get a turn"
            )
        if self.tensor_parallel_size > 1:
            self._check_ranks(self.tensor_parallel_size)
        return self

    def _check_ranks(self, size: int) -> None:
        if self.model_impl == "transformers":
            raise ValueError(
                f"tensor_parallel_size {size} is for models of our own, not for model_impl"
                f" {self.model_impl!r}"
            )
        if ":" in self.device:
            raise ValueError(
                f"tensor_parallel_size {size} takes more than device {self.device!r}: name them in"
                " CUDA_VISIBLE_DEVICES, and give device 'cuda'"
            )
