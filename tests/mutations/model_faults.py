"""Faults of what computes: attention, layers, rotary positions, weights."""

from __future__ import annotations

from mutations.fault import Fault

_MODEL = "worker/headrace_worker/model/"
_ATTENTION = "worker/headrace_worker/attention/"
_LOGITS = "tests/equivalence/test_model_matches_transformers.py::test_logits_of_known_text[{}]"
_WINDOWS = "tests/contract/test_attention_backends.py::test_sliding_windows"

MODEL_FAULTS = (
    Fault(
        "window off by one in a chunk",
        _ATTENTION + "plan.py",
        "hidden |= age >= window",
        "hidden |= age > window",
        _WINDOWS,
    ),
    Fault(
        "window off by one in a decode",
        _ATTENTION + "plan.py",
        "hidden |= position < self.seq_lens[:, None] - window",
        "hidden |= position < self.seq_lens[:, None] - window - 1",
        _WINDOWS,
    ),
    Fault(
        "stale keys behind a sequence's end",
        _ATTENTION + "plan.py",
        "hidden = position >= self.seq_lens[:, None]",
        "hidden = position > self.seq_lens[:, None]",
        "tests/contract/test_attention_backends.py::test_any_batch",
    ),
    Fault(
        "scores without their scale",
        _MODEL + "layer.py",
        "scale=config.attention_scale,",
        "scale=1.0,",
        _LOGITS.format("llama-cpu-7"),
    ),
    Fault(
        "scores without their soft cap",
        _MODEL + "layer.py",
        "soft_cap=config.attention_soft_cap,",
        "soft_cap=None,",
        _LOGITS.format("gemma2-cpu-7"),
    ),
    Fault(
        "logits without their soft cap",
        _MODEL + "decoder.py",
        "        if cap is not None:\n",
        "        if False:\n",
        _LOGITS.format("gemma2-cpu-7"),
    ),
    Fault(
        "every layer has the first one's window",
        _MODEL + "layer.py",
        "window=config.windows[self.index],",
        "window=config.windows[0],",
        _LOGITS.format("gemma2-cpu-7"),
    ),
    Fault(
        "query and key not normed",
        _MODEL + "layer.py",
        "torch.cat((norm(query, self.query_norm), norm(key, self.key_norm)), dim=1)",
        "torch.cat((query, key), dim=1)",
        _LOGITS.format("qwen3-cpu-7"),
    ),
    Fault(
        "biases left out",
        _MODEL + "linear.py",
        "return multiply_packed(x, self._packed, self._bias)",
        "return multiply_packed(x, self._packed, None)",
        _LOGITS.format("qwen2-cpu-7"),
    ),
    Fault(
        "tied head is random",
        _MODEL + "decoder.py",
        "self.embedding if config.tie_word_embeddings else torch.empty_like(self.embedding)",
        "torch.randn_like(self.embedding)",
        _LOGITS.format("llama-cpu-7"),
    ),
    Fault(
        "rotation in the wrong direction",
        _MODEL + "rope.py",
        "torch.cat((-sin, sin), dim=-1)",
        "torch.cat((sin, -sin), dim=-1)",
        _LOGITS.format("llama-cpu-7"),
    ),
    Fault(
        "rows of GGUF left in their order",
        _MODEL + "gguf.py",
        "if self._architecture.is_interleaved:",
        "if False:",
        "tests/equivalence/test_model_matches_transformers.py"
        "::test_a_gguf_file_computes_what_its_source_does[llama]",
    ),
)
