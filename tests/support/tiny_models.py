"""Tiny random models of the supported families, with a tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

TINY_VOCAB_SIZE = 320  # of the tokenizer: 3 special tokens, 256 bytes and 61 merges
END_OF_TEXT, CHAT_START, CHAT_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHAT_END_ID = 2  # ends a turn, and is the models' end-of-sequence id

_CORPUS = (
    "the worker pulls exactly as many prompts from the queue as its free blocks can take; "
    "every token that it writes is read once, in order, whatever happens to the worker. "
    "a river brings the water to the mill and the mill turns with the water of the river."
)
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

# Values at which a tiny model still shows what its family computes.
_FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "smollm3": {"no_rope_layer_interval": 2},
    "gemma2": {
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
    },
}


def make_tiny_llama(
    path: Path,
    *,
    tie: bool = True,
    vocab_size: int = TINY_VOCAB_SIZE,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    **options: Any,
) -> Path:
    """Save a random Llama with tokenizer in folder ``path``; ``options`` go to its config."""
    return make_tiny_model(
        path,
        "llama",
        seed=seed,
        tie_word_embeddings=tie,
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        **options,
    )


def make_tiny_model(
    path: Path, model_type: str = "llama", *, seed: int = 0, **options: Any
) -> Path:
    """Save a random model of any family with tokenizer in folder ``path``, as safetensors."""
    build_tiny_model(model_type, seed=seed, **options).save_pretrained(path)
    build_tiny_tokenizer().save_pretrained(path)
    return path


def build_tiny_model(model_type: str = "llama", *, seed: int = 0, **options: Any) -> Any:
    """Return transformers' random model: 2 layers, hidden 64, 4 heads, 2 KV heads by default."""
    settings: dict[str, Any] = {
        "vocab_size": TINY_VOCAB_SIZE,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": None,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": CHAT_END_ID,
        "pad_token_id": 0,
        **_FAMILY_OPTIONS.get(model_type, {}),
        **options,
    }
    if settings["head_dim"] is None:
        settings["head_dim"] = settings["hidden_size"] // settings["num_attention_heads"]
    factory: Any = AutoModelForCausalLM  # transformers leaves it untyped
    # Some releases of transformers compute Gemma 2 through SDPA, which leaves its soft cap out.
    attention = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    config = AutoConfig.for_model(model_type, **settings)
    model = factory.from_config(config, dtype=torch.float32, **attention)
    _randomize(model, seed)
    return model.eval()


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, so that every text can be encoded and every id decoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY_VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, CHAT_START, CHAT_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_CORPUS], trainer)
    assert tokenizer.get_vocab_size() == TINY_VOCAB_SIZE
    factory: Any = PreTrainedTokenizerFast  # transformers leaves it untyped
    fast: PreTrainedTokenizerFast = factory(
        tokenizer_object=tokenizer,
        eos_token=CHAT_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[CHAT_START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = _CHAT_TEMPLATE
    return fast


@torch.no_grad()
def _randomize(model: Any, seed: int) -> None:
    """Fill norms and biases too, so that leaving one out shows; matrices large enough to vary."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("norm.weight") and not model.config.model_type.startswith("gemma"):
            parameter.copy_(1 + 0.2 * noise)
        else:
            parameter.copy_(0.2 * noise)
