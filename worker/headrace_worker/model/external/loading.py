"""From a folder to a model of transformers that runs on packed batches, checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from headrace_worker.model.errors import ModelLoadError
from headrace_worker.model.external.check import check_decoder, plain_logits, sample_tokens
from headrace_worker.model.external.decoder import ExternalConfig, ExternalDecoder
from headrace_worker.model.external.packing import pack_model, widest_product
from headrace_worker.model.external.probe import AttentionFacts, probe_attention
from headrace_worker.model.external.refusals import choose_class

_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k")
# What model code raises when it is used in a way that it is not made for.
_MODEL_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    SafetensorError,
    TypeError,
    ValueError,
)


def load_external(
    folder: Path,
    hf_config: Any,
    eos_token_ids: tuple[int, ...],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[ExternalConfig, ExternalDecoder]:
    """Load the safetensors in ``folder`` into transformers' own model, and prove that it fits.

    The proof costs three passes of a few tokens.

    Raises:
        ModelLoadError: the model is damaged, or would be computed wrongly; the message says why.
    """
    model_class = choose_class(hf_config)
    name = model_class.__name__
    with _explained(name, f"cannot be loaded from {folder}"):
        model = _load(model_class, folder, hf_config, dtype, device)
    with _explained(name, "does not run on packed batches"):
        return _adapt(model, eos_token_ids, dtype)


def _adapt(
    model: Any, eos_token_ids: tuple[int, ...], dtype: torch.dtype
) -> tuple[ExternalConfig, ExternalDecoder]:
    token_ids = sample_tokens(model.config.vocab_size, model.device)
    expected = plain_logits(model, token_ids)
    with torch.inference_mode():
        facts = probe_attention(model, token_ids[:1])
    if model.get_input_embeddings().weight.shape[0] != expected.shape[-1]:
        raise ModelLoadError(
            f"{expected.shape[-1]} logits for {model.get_input_embeddings().weight.shape[0]}"
            " embedded tokens are not supported"
        )
    config = _describe(model, facts, int(expected.shape[-1]), eos_token_ids)
    weights_bytes = _count_bytes(model)
    pack_model(model)
    decoder = ExternalDecoder(model, facts.windows, weights_bytes)
    check_decoder(decoder, facts, token_ids, expected, dtype)
    return config, decoder


def _load(
    model_class: Any, folder: Path, hf_config: Any, dtype: torch.dtype, device: torch.device
) -> Any:
    with _no_progress_bar():
        model, report = model_class.from_pretrained(
            folder,
            config=hf_config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            attn_implementation="eager",
            # For the reference on a CPU; on a GPU transformers chooses what is fastest.
            **({"experts_implementation": "eager"} if device.type == "cpu" else {}),
        )
    for problem, names in report.items():
        if names:
            shown = ", ".join(sorted(map(str, names))[:5])
            raise ModelLoadError(f"the checkpoint has {problem.replace('_', ' ')}: {shown}")
    model.config.return_dict = True  # a configuration may ask for tuples, or for more outputs
    for extra in ("output_attentions", "output_hidden_states", "output_router_logits"):
        if getattr(model.config, extra, False):
            setattr(model.config, extra, False)
    return model.eval().to(device)


def _describe(
    model: Any, facts: AttentionFacts, vocab_size: int, eos_token_ids: tuple[int, ...]
) -> ExternalConfig:
    hf_config = model.config
    chosen = (getattr(hf_config, name, None) for name in _EXPERTS_PER_TOKEN)
    experts_per_token = next((count for count in chosen if isinstance(count, int)), 1)
    return ExternalConfig(
        architecture=hf_config.model_type,
        vocab_size=vocab_size,
        hidden_size=facts.hidden_size,
        intermediate_size=widest_product(model.get_decoder(), experts_per_token),
        num_layers=facts.num_layers,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        max_position_embeddings=hf_config.max_position_embeddings,
        windows=facts.windows,
        eos_token_ids=eos_token_ids,
    )


def _count_bytes(model: Any) -> int:
    """Count the memory of weights and tables, and of the copy that packing makes of a tied head."""
    tensors = [*model.parameters(), *model.buffers()]
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    is_copied = head is not None and head.weight is embedding.weight and model.device.type == "cpu"
    weights_bytes = sum(int(tensor.nbytes) for tensor in tensors)
    return weights_bytes + int(embedding.weight.nbytes) * is_copied


@contextmanager
def _explained(name: str, summary: str) -> Iterator[None]:
    """Turn what transformers and model code raise into a ModelLoadError; each names the class."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{name}: {error}") from error
    except _MODEL_ERRORS as error:
        raise ModelLoadError(f"{name} {summary}: {type(error).__name__}: {error}") from error


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """A worker's stderr is for its log."""
    bars: Any = logging  # transformers leaves it untyped
    was_enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            bars.enable_progress_bar()
