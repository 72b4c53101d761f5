"""From settings to an engine: load the model, size and allocate the KV cache, wire the parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

import torch

from headrace_worker.attention import AttentionBackend, KVCacheSpec, create_backend
from headrace_worker.engine.accelerator import Accelerator
from headrace_worker.engine.admission import Admission
from headrace_worker.engine.block_pool import BlockPool
from headrace_worker.engine.device_memory import CudaMeter
from headrace_worker.engine.engine import Engine
from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.grammar import GrammarTokens
from headrace_worker.engine.grammar_compiler import GrammarCompiler
from headrace_worker.engine.memory import (
    KVCachePlan,
    default_cpu_kv_bytes,
    estimate_activation_bytes,
    plan_kv_cache,
)
from headrace_worker.engine.messages import EngineReady
from headrace_worker.engine.one_ahead import OneAheadEngine
from headrace_worker.engine.runner import Decoder, ModelRunner
from headrace_worker.engine.scheduler import Scheduler
from headrace_worker.engine.scores import MAX_ROWS
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.kernels import load_kernels
from headrace_worker.model import LoadedModel, load_model
from headrace_worker.model.quantization import check_quantization
from headrace_worker.model.ranks import ALONE, Ranks

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_engine(
    settings: EngineSettings,
    ranks: Ranks = ALONE,
    lead: Callable[[Decoder], Decoder] = lambda decoder: decoder,
) -> tuple[Engine, EngineReady]:
    """Build the engine; raises SettingsError or ModelLoadError.

    With several ``ranks`` each builds its own, and the runner of the first gets its decoder from
    ``lead``. All of them do the same in here, so collectives pair up.
    """
    started_s = perf_counter()
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    device = choose_device(settings.device)
    make_current(device)
    dtype = choose_dtype(settings.dtype, device)
    check_quantization(settings.quantization, dtype, device)  # before all is read
    model = load_model(
        settings.model, dtype=dtype, device=device, model_impl=settings.model_impl, ranks=ranks
    ).packed(settings.quantization)
    backend = create_backend(
        settings.attention_backend, device, dtype=dtype, head_dim=model.config.head_dim
    )
    parts = _Parts(settings, model, backend, device, dtype, ranks)
    max_model_len = parts.choose_max_model_len()  # before the memory is taken
    accelerator = parts.accelerator(max_model_len)
    plan = parts.allocate_kv_cache(accelerator)
    decoder = accelerator.with_graphs(lead(model.decoder))
    engine_class = OneAheadEngine if accelerator.is_one_ahead else Engine
    engine = parts.build_engine(engine_class, plan, max_model_len, decoder)
    return engine, parts.describe(engine, plan, perf_counter() - started_s)


def choose_device(name: str) -> torch.device:
    """Return the device meant by a setting; raises SettingsError for an unusable one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise SettingsError(f"unknown device {name!r}") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SettingsError(
            f"device {name!r} is not available: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def make_current(device: torch.device) -> None:
    """Have this process compute on a GPU that was named by its number.

    Triton launches on the current one, and there is where streams, events and graphs are made.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype meant by a setting.

    On a CPU that is float32 unless asked: only there is an answer the same whatever shares the
    batch, and so the same after a takeover.
    """
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise SettingsError(f"unknown dtype {name!r}; known are auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def make_grammars(settings: EngineSettings) -> GrammarCompiler | None:
    """Return what compiles grammars, where the settings name a tokenizer; nothing is read yet."""
    if settings.tokenizer_file is None:
        return None
    load_tokens = partial(
        GrammarTokens.load, settings.tokenizer_file, settings.eos_token_ids, settings.num_threads
    )
    return GrammarCompiler(load_tokens, compile_timeout_s=settings.grammar_timeout_s)


@dataclass(frozen=True, slots=True)
class _Parts:
    """What was loaded, before it is put together."""

    settings: EngineSettings
    model: LoadedModel
    backend: AttentionBackend
    device: torch.device
    dtype: torch.dtype
    ranks: Ranks

    def choose_max_model_len(self) -> int:
        limit = self.model.config.max_position_embeddings
        wanted = self.settings.max_model_len
        if wanted is None:
            return limit
        if not 1 < wanted <= limit:
            reason = self.model.config.length_limit_reason
            explained = f": {reason}" if reason else ""
            raise SettingsError(
                f"max_model_len {wanted} is not in 2 … {limit}, the model's limit{explained}"
            )
        return wanted

    def accelerator(self, max_model_len: int) -> Accelerator:
        spec = KVCacheSpec(
            num_layers=self.model.config.num_layers,
            num_kv_heads=self.model.config.num_kv_heads,
            head_dim=self.model.config.head_dim,
            dtype=self.dtype,
            device=self.device,
            block_size=self._choose_block_size(),
        )
        decoder, size = self.model.decoder, self.ranks.size
        return Accelerator(self.settings, decoder, self.backend, spec, max_model_len, size)

    def allocate_kv_cache(self, accelerator: Accelerator) -> KVCachePlan:
        spec = accelerator.spec
        kv_cache_bytes, activation_bytes = self._divide_memory(accelerator)
        plan = plan_kv_cache(
            kv_cache_bytes=self.ranks.least(kv_cache_bytes, self.device),
            weights_bytes=self.model.weights_bytes,
            activation_bytes=activation_bytes,
            kv_bytes_per_token=spec.bytes_per_token,
            block_size=spec.block_size,
        )
        try:
            self.backend.allocate(spec, plan.num_blocks + 1)
        except torch.OutOfMemoryError as error:
            raise SettingsError(
                f"no memory for a KV cache of {plan.num_blocks + 1} blocks of {spec.block_size}"
                f" tokens, {spec.bytes_per_token} bytes each: {error}"
            ) from error
        return plan

    def build_engine(
        self,
        engine_class: type[Engine],
        plan: KVCachePlan,
        max_model_len: int,
        decoder: Decoder,
    ) -> Engine:
        settings = self.settings
        pool = BlockPool(
            plan.num_blocks,
            plan.block_size,
            enable_prefix_caching=settings.enable_prefix_caching,
        )
        admission = Admission(pool, max_model_len=max_model_len, reserve=settings.reserve)
        scheduler = Scheduler(
            pool,
            admission,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
        )
        runner = ModelRunner(
            decoder,
            self.backend,
            block_size=plan.block_size,
            device=self.device,
            sampled_vocab_size=settings.sampled_vocab_size,
        )
        return engine_class(
            scheduler,
            runner,
            vocab_size=self.model.config.vocab_size,
            grammars=make_grammars(settings),
        )

    def describe(self, engine: Engine, plan: KVCachePlan, load_s: float) -> EngineReady:
        kernels = load_kernels() if self.device.type == "cpu" else None
        return EngineReady(
            model=self.settings.model_name or self.model.name,
            device=str(self.device),
            dtype=str(self.dtype).removeprefix("torch."),
            attention_backend=self.backend.name,
            vocab_size=self.model.config.vocab_size,
            max_model_len=engine.scheduler.admission.max_model_len,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            memory_budget_bytes=plan.memory_budget_bytes,
            weights_bytes=plan.weights_bytes,
            activation_bytes=plan.activation_bytes,
            kv_bytes_per_token=plan.kv_bytes_per_token,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
            load_s=load_s,
            tensor_parallel_size=self.ranks.size,
            kernels_build_s=None if kernels is None else kernels.build_s,
            missing_kernels=None if kernels is None else kernels.missing_reason,
        )

    def _choose_block_size(self) -> int:
        supported = self.backend.supported_block_sizes()
        wanted = self.settings.block_size
        if wanted is None:
            return supported[0]
        if wanted not in supported:
            raise SettingsError(
                f"block_size {wanted} is not one of {supported},"
                f" which the {self.backend.name} backend takes"
            )
        return wanted

    def _activation_bytes(self) -> int:
        return estimate_activation_bytes(
            num_tokens=self.settings.max_num_batched_tokens,
            num_rows=max(self.settings.max_num_seqs, MAX_ROWS),
            hidden_size=self.model.config.hidden_size,
            intermediate_size=self.model.config.intermediate_size,
            vocab_size=self.model.config.vocab_size,
            itemsize=self.dtype.itemsize,
        )

    def _divide_memory(self, accelerator: Accelerator) -> tuple[int, int]:
        """Return the bytes for KV blocks, and those for activations and graphs."""
        given = self.settings.kv_cache_memory_bytes
        if self.device.type == "cpu":
            kv_cache_bytes = default_cpu_kv_bytes() if given is None else given
            return kv_cache_bytes, self._activation_bytes()
        # Also where nothing is to be divided: a step that cannot run is refused before it is due.
        use = accelerator.survey(CudaMeter(self.device))
        left = use.kv_cache_bytes(self.settings.gpu_memory_utilization)
        return (left if given is None else given), use.activation_bytes + use.graph_bytes
