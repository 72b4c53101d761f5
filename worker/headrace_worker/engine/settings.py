"""The engine's settings: the first message it receives, with everything already resolved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from headrace_worker.engine.errors import SettingsError


class Reserve(StrEnum):
    """How much room a sequence must find before it enters."""

    EXPECTED = "expected"  # prompt and expected output; may have to preempt
    WORST = "worst"  # prompt and max_tokens; never preempts


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What to load and how much to run at once; raises SettingsError when it contradicts itself."""

    model: str  # a name, a folder, a .gguf file or a hub id: what load_model takes
    model_name: str | None = None  # what reports call the model; None: the loader's own name
    model_impl: str = "auto"  # auto, native, transformers: whose model code runs
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    quantization: str = "none"  # none, int8, fp8: of the projections
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    tensor_parallel_size: int = 1  # ranks that the model is cut over, a process each
    max_model_len: int | None = None  # tokens, prompt and output together; None: the model's own
    max_num_seqs: int = 256  # most sequences running at once
    max_num_batched_tokens: int = 512  # token budget of a step
    kv_cache_memory_bytes: int | None = None  # for the KV cache alone; None: from what is free
    gpu_memory_utilization: float = 0.9  # of the device's memory, for everything; CUDA only
    block_size: int | None = None  # tokens; None: the attention backend's preferred one
    attention_backend: str | None = None  # None: the best that is available
    num_threads: int | None = None  # CPU threads; None: torch decides
    one_ahead: bool | None = None  # schedule a step while the last one runs; None: on CUDA only
    cuda_graphs: bool = True  # replay decodes, where the device, the model and attention can
    reserve: Reserve = Reserve.EXPECTED
    enable_prefix_caching: bool = True
    sampled_vocab_size: int | None = None  # ids from here on are padding and never sampled
    tokenizer_file: str | None = None  # a tokenizer.json, for grammars; None: they are refused
    eos_token_ids: tuple[int, ...] = ()  # what a grammar ends with
    grammar_timeout_s: float = 10.0  # to compile one

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "tensor_parallel_size"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs"
                f" {self.max_num_seqs}: some running sequences would never get a turn"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise SettingsError(
                f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}"
            )
