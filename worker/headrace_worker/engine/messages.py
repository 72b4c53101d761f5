"""What crosses the channel between the transport process and the engine process.

Standard library only: both sides import it, and neither may pull in the other's dependencies.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class SequenceFinish(StrEnum):
    """Why the engine ended a sequence by itself."""

    STOP = "stop"  # an end-of-sequence or stop token was sampled
    LENGTH = "length"  # max_tokens reached, or the context is full


@dataclass(frozen=True, slots=True)
class SamplingSpec:
    """Sampling as the engine needs it: validated, with all defaults resolved."""

    max_tokens: int  # most tokens to generate, tokens from earlier epochs counted
    seed: int  # unsigned 64 bit; with the position it determines each draw
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1]
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output only
    frequency_penalty: float = 0.0  # over output only
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    min_tokens: int = 0  # stop tokens are masked before this many output tokens
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless they are ignored
    logprobs: int | None = None  # None: none; k: the sampled token's and the k most likely
    prompt_logprobs: int | None = None  # the same for every prompt token but the first
    bad_words: tuple[tuple[int, ...], ...] = ()  # runs of token ids that the output never holds
    grammar: str | None = None  # checked, in the form that the engine's grammar compiler reads


@dataclass(frozen=True, slots=True)
class AddSequence:
    """Start or resume a sequence."""

    seq_id: int  # unique within the engine's life, chosen by the bridge
    token_ids: tuple[int, ...]  # prompt, then tokens that earlier epochs already emitted
    num_prompt_tokens: int  # token_ids[:num_prompt_tokens] is the prompt
    sampling: SamplingSpec
    priority: int = 5  # 0 soonest … 9
    salt: bytes = b""  # prefix-cache domain, one per tenant


@dataclass(frozen=True, slots=True)
class AbortSequences:
    """Drop sequences and free their blocks; unknown ids are ignored, so it may be repeated."""

    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SetPriority:
    """Serve a sequence sooner or later than it was asked for; an unknown id is ignored."""

    seq_id: int
    priority: int  # 0 soonest … 9


@dataclass(frozen=True, slots=True)
class SetPaused:
    """Stop or go on stepping: how back-pressure from a slow Redis reaches the device."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Ping:
    """Ask the engine loop whether it still turns; answered with a Pong between two steps."""

    nonce: int


@dataclass(frozen=True, slots=True)
class Shutdown:
    """Leave the loop after the current step."""


Command = AddSequence | AbortSequences | SetPriority | SetPaused | Ping | Shutdown


@dataclass(frozen=True, slots=True)
class EngineReady:
    """First message of an engine: the model is loaded and the KV cache stands.

    Memory in bytes: ``num_blocks = (memory_budget - weights - activations)
    / (block_size * kv_bytes_per_token)``.
    """

    model: str
    device: str
    dtype: str
    attention_backend: str
    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    block_size: int  # tokens
    num_blocks: int  # usable blocks, the trash block not counted
    memory_budget_bytes: int  # M
    weights_bytes: int  # W
    activation_bytes: int  # temporaries of the largest step, and CUDA graphs
    kv_bytes_per_token: int  # k
    max_num_seqs: int
    max_num_batched_tokens: int
    load_s: float
    kernels_build_s: float | None = None  # seconds the C++ kernels took to build; None: not needed
    missing_kernels: str | None = None  # why a CPU runs without them; None: it does not
    tensor_parallel_size: int = 1  # ranks; bytes are those of one, and each has as many blocks

    @property
    def max_kv_tokens(self) -> int:
        """N_max: tokens that the KV cache can hold."""
        return self.num_blocks * self.block_size


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One new token of one sequence."""

    seq_id: int
    token_id: int
    logprob: float | None = None  # natural log, of the sampled token
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely the model found one token of a prompt, given those before it."""

    token_id: int
    logprob: float  # natural log
    top_logprobs: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Scores of prompt tokens [start, start + len(scores)); each is told once, in order."""

    seq_id: int
    start: int  # place in the prompt, at least 1: nothing predicts the first token
    scores: tuple[TokenScore, ...]


@dataclass(frozen=True, slots=True)
class SequenceFailure:
    """The engine cannot go on with this one sequence; its neighbours are not affected."""

    seq_id: int
    code: str  # a value of headrace.errors.ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """All that happened in one step; one frame."""

    step: int  # counts from 1
    tokens: tuple[SampledToken, ...]
    finished: tuple[tuple[int, SequenceFinish], ...]  # (seq_id, why); its last token is in `tokens`
    failed: tuple[SequenceFailure, ...]
    admitted: tuple[tuple[int, int], ...]  # (seq_id, cached prompt tokens), first admission only
    preempted: tuple[int, ...]  # seq_ids sent back to waiting in this step
    num_running: int
    num_waiting: int
    free_blocks: int  # free or evictable, less what running and waiting sequences will need
    num_blocks: int
    num_scheduled_tokens: int
    num_prefill_tokens: int  # of these, tokens of prefill chunks
    num_scheduled_seqs: int  # sequences that had a share of this step
    adds_seen: int  # AddSequence commands processed so far: which of them free_blocks accounts for
    step_s: float
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # of sequences that asked for them


@dataclass(frozen=True, slots=True)
class Bystanders:
    """Who is here and has no share in the step that begins; told when that changes.

    Should the step never return, nobody blames them.
    """

    seq_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Pong:
    """Answer to a Ping: the loop turns, after this many steps."""

    nonce: int
    step: int


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """Last message of an engine that cannot go on: it exits after this."""

    message: str
    seq_ids: tuple[int, ...]  # sequences that were in the batch of the failing step


Report = EngineReady | StepOutcome | Bystanders | Pong | EngineFailed
