"""Reading a model's configuration: every option is understood or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_worker.model import ModelConfig, ModelLoadError
from headrace_worker.model.config import from_values, read_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def read(folder: Path, generation: object | None = None, **changes: Any) -> ModelConfig:
    """Write config.json (and generation_config.json) with ``changes``, then read it."""
    (folder / "config.json").write_text(json.dumps({**BASE, **changes}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder)


def test_a_plain_llama(tmp_path: Path) -> None:
    """Sizes come from the file, flags and head_dim from the family's defaults."""
    config = read(tmp_path)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 4, 2)
    assert config.head_dim == 16
    assert config.windows == (None,) * 4
    assert config.eos_token_ids == (2,)


def test_an_old_llama_has_as_many_kv_heads_as_heads(tmp_path: Path) -> None:
    """Without num_key_value_heads there is no grouping."""
    assert read(tmp_path, num_key_value_heads=None).num_kv_heads == 4


def test_head_dim_may_differ_from_the_quotient(tmp_path: Path) -> None:
    """A stated head_dim wins over hidden_size / heads."""
    assert read(tmp_path, head_dim=32).head_dim == 32


@pytest.mark.parametrize(
    ("model_type", "changes", "flags"),
    [
        ("llama", {}, (False, False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False, False)),
        ("llama", {"mlp_bias": True}, (False, False, True, False)),
        ("mistral", {}, (False, False, False, False)),
        ("qwen2", {}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
    ],
)
def test_flags_of_the_families(
    tmp_path: Path, model_type: str, changes: dict[str, Any], flags: tuple[bool, ...]
) -> None:
    """Each family has its biases and norms: qkv, output, feed-forward, query and key norm."""
    config = read(tmp_path, model_type=model_type, **changes)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm) == flags


def test_mistral_slides_in_every_layer(tmp_path: Path) -> None:
    """Mistral's sliding_window holds for all layers."""
    config = read(tmp_path, model_type="mistral", sliding_window=100)
    assert config.windows == (100,) * 4


def test_qwen_slides_only_when_told_and_where(tmp_path: Path) -> None:
    """Qwen2 ignores sliding_window unless it is in use, and then spares the first layers."""
    fields: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 9, "max_window_layers": 3}
    assert read(tmp_path, **fields).windows == (None,) * 4
    config = read(tmp_path, **fields, use_sliding_window=True)
    assert config.windows == (None, None, None, 9)


@pytest.mark.parametrize(
    ("eos", "generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (None, None, ()),
        (2, {"eos_token_id": [5, 9]}, (5, 9)),
        (2, {"eos_token_id": 7}, (7,)),
        (2, {"temperature": 0.6}, (2,)),
        (0, {"eos_token_id": None}, (0,)),
    ],
)
def test_end_of_sequence_ids(
    tmp_path: Path, eos: object, generation: object, expected: tuple[int, ...]
) -> None:
    """A list in generation_config.json is not ignored; without one config.json decides."""
    assert read(tmp_path, generation, eos_token_id=eos).eos_token_ids == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model type 'gemma' is not supported"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "SequenceClassification"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq'"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"num_attention_heads": 0}, "cannot read the configuration"),
        ({"num_key_value_heads": 0}, "4 attention heads are no multiple of 0"),
        ({"head_dim": 3}, "head_dim 3 is odd"),
        ({"head_dim": 15}, "head_dim`=15"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_theta": "high"}, "rope type 'default': bad parameters .*'high'"),
        ({"rope_scaling": {**YARN, "factor": None}}, "rope type 'yarn': bad parameters .*None"),
        ({"rope_scaling": {**YARN, "factor": "four"}}, "rope type 'yarn': bad parameters .*'four'"),
    ],
)
def test_what_is_not_supported_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """An unsupported or malformed option is named, and nothing is computed without it."""
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, **changes)


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    """No config.json, no JSON in it, and no JSON in generation_config.json are load errors."""
    with pytest.raises(ModelLoadError, match="cannot read the configuration"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot read the configuration"):
        read_config(tmp_path)
    (tmp_path / "generation_config.json").write_text("[1,")
    with pytest.raises(ModelLoadError, match="cannot read the configuration"):
        read(tmp_path)


@pytest.mark.parametrize(
    "generation", [[], 5, {"eos_token_id": "</s>"}, {"eos_token_id": [1, [2]]}], ids=str
)
def test_an_end_of_sequence_id_that_is_none_is_refused(tmp_path: Path, generation: object) -> None:
    """A generation_config.json of another shape is a load error, not an id that never comes."""
    with pytest.raises(ModelLoadError, match="cannot read the configuration"):
        read(tmp_path, generation)


def test_values_of_an_unknown_family_are_refused() -> None:
    """The family is checked before transformers is asked about it."""
    with pytest.raises(ModelLoadError, match="supported: llama, mistral, qwen2, qwen3, smollm3"):
        from_values("mamba", {}, ())


def test_a_configuration_is_frozen(tmp_path: Path) -> None:
    """Nobody changes a configuration after it was checked."""
    config = read(tmp_path)
    with pytest.raises(AttributeError):
        config.num_layers = 1  # type: ignore[misc]
