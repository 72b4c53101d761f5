"""A model that needs what is not computed is refused, and the message names the option."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_worker.model import ModelLoadError
from headrace_worker.model.config import from_values
from support.model_configs import YARN, read


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model type 'gemma' is not supported"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        (
            {"architectures": ["XverseForCausalLM"]},
            "'XverseForCausalLM' is not supported; .*'Llama",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq'"),
        ({"quantization_config": {"bits": 4}}, "quantization method 'unknown'"),
    ],
)
def test_another_kind_of_model_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """What the decoder does not run at all is told apart by type, class and number format."""
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"model_type": "gemma2", "hidden_activation": "relu"}, "activation 'relu'"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 4}, "linear_attention"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention"] * 3},
            "layer_types",
        ),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"] * 4}, "no sliding_window"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window 0 is not supported"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_att"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"model_type": "smollm3", "no_rope_layers": [1, 0]}, "cannot read the configuration"),
        (
            {"model_type": "smollm3", "no_rope_layers": [1], "layer_types": ["full_attention"] * 4},
            "no_rope_layers has 1 entries, not 4",
        ),
    ],
)
def test_an_option_of_the_family_that_is_not_computed_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Fields that a family's own class knows are computed or refused, never skipped."""
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_multiplier": 0.5},
        {"embedding_multiplier": 12.0},
        {"residual_multiplier": 0.22},
        {"logits_scaling": 8.0},
        {"logit_scale": 0.0625},
        {"scale_emb": 12},
        {"clip_qkv": 8.0},
        {"attn_logit_softcapping": 50.0},
        {"final_logit_softcapping": 30.0},
        {"query_pre_attn_scalar": 224},
        {"use_qk_norm": True},
        {"use_bidirectional_attention": True},
        {"is_causal": False, "attention_chunk_size": 128},
        {"attention_sink": True},
        {"rope_interleaved": True},
        {"sliding_window": 64},
        {"no_rope_layers": [1, 0, 1, 0]},
        {"num_local_experts": 8},
        {"use_parallel_residual": True},
        {"alibi": True},
        {"model_type": "mistral", "attention_bias": True},
        {"model_type": "gemma3_text", "partial_rotary_factor": 0.5},
        {"model_type": "qwen2", "attention_bias": True},
        {"model_type": "phi3", "lm_head_bias": True},
        {"model_type": "gemma2", "sliding_window_pattern": 3},
        {"model_type": "gemma2", "sliding_window": 64, "sliding_window_size": 32},
    ],
    ids=str,
)
def test_a_field_that_the_class_would_drop_is_refused(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """A field from another family that would change the computation is refused by its name."""
    *_, name = changes
    with pytest.raises(ModelLoadError, match=rf"{name} \(.*\) is not supported for model type"):
        read(tmp_path, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_interleaved": False, "is_llama_config": True, "transformers.js_config": {"a": 1}},
        {"pretraining_tp": 4, "_attn_implementation_autoset": True, "attn_implementation": "sdpa"},
        {"attention_multiplier": 1.0, "clip_qkv": None, "num_experts": 0},
        {"seq_length": 4096, "conversation_template": "plain", "auto_map": {"AutoConfig": "a.B"}},
        {"temperature": 0.6, "repetition_penalty": 1.2, "attention_probs_dropout_prob": 0.1},
        {"model_type": "mistral", "attention_bias": False, "sliding_window": None},
        {"model_type": "qwen2", "use_mrope": False, "sliding_window": 131072},
        {"model_type": "smollm3", "max_window_layers": 28, "sliding_window": None},
        {"model_type": "gemma2", "sliding_window": 64, "sliding_window_size": 64},
        {"model_type": "gemma3_text", "sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
        {"model_type": "phi3", "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
        {
            "model_type": "gemma2",
            "hidden_act": "gelu_pytorch_tanh",
            "cache_implementation": "hybrid",
        },
    ],
    ids=str,
)
def test_a_field_that_changes_nothing_is_ignored(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Bookkeeping, and options that are off, keep no model from loading."""
    assert read(tmp_path, **changes).num_layers == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"num_attention_heads": 0}, "cannot read the configuration"),
        ({"num_key_value_heads": 0}, "4 attention heads are no multiple of 0"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"head_dim": 15}, "head_dim"),
        ({"hidden_size": "wide"}, "hidden_size"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Impossible sizes are named with their values."""
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, **changes)


MAGIC = {"rope_type": "magic", "factor": 2.0}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor \(?0.5"),
        ({"rope_theta": "high"}, "rope type 'default': bad parameters .*'high'"),
        ({"rope_scaling": {**YARN, "factor": None}}, "rope type 'yarn': bad parameters .*None"),
        ({"rope_scaling": {**YARN, "factor": "four"}}, "rope type 'yarn': bad parameters .*'four'"),
        ({"rope_scaling": MAGIC}, "rope type 'magic' is not supported"),
        ({"rope_scaling": {"type": "magic", "factor": 2.0}}, "rope type 'magic' is not supported"),
        ({"rope_parameters": {**MAGIC, "rope_theta": 1e4}}, "rope type 'magic' is not supported"),
        ({"rope_scaling": MROPE}, r"rope parameter 'mrope_section' \(\[2, 3, 3\]\)"),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": MAGIC}},
            "rope type 'magic' is not supported",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"factor": 8.0}},
            r"rope parameter 'factor' \(8.0\)|cannot read",
        ),
        (
            {"model_type": "qwen3", "rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope parameter 'full_attention'|cannot read",
        ),
    ],
    ids=str,
)
def test_rotary_positions_that_are_not_understood_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """An unknown rope type or parameter is named in either spelling, and never run as default."""
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, **changes)


def test_values_of_an_unknown_family_are_refused() -> None:
    """The family is checked before transformers is asked about it."""
    with pytest.raises(ModelLoadError, match="supported: llama, mistral, qwen2, qwen3, smollm3"):
        from_values("mamba", {}, ())
