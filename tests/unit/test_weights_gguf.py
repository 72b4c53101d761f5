"""Loading GGUF: metadata, row order and quantized blocks give the model they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from headrace_worker.model import ModelConfig, ModelLoadError
from headrace_worker.model.gguf import GgufModel
from headrace_worker.model.rope import RopeSpec
from support.native import config_of, decoder_of, load, load_parameters
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import build_tiny_model


def read(path: Path, model: Any = None, **options: Any) -> ModelConfig:
    """Write a GGUF file with ``options`` and return the configuration read from it."""
    return config_of(
        load(write_tiny_gguf(path / "tiny.gguf", model or build_tiny_model(), **options))
    )


def rope_of(config: ModelConfig) -> RopeSpec:
    """Return the one rope of all layers."""
    (rope,) = set(config.ropes)
    assert rope is not None
    return rope


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_weights_equal_the_model_they_came_from(tmp_path: Path, family: str, tie: bool) -> None:
    """Llama's query and key rows are put back in order, Qwen's are left alone, biases are kept."""
    source = build_tiny_model(family, tie_word_embeddings=tie)
    model = load(write_tiny_gguf(tmp_path / "tiny.gguf", source))
    expected = source.state_dict()
    for name, parameter in decoder_of(model).parameters().items():
        assert torch.equal(parameter, expected[name]), name
    assert config_of(model).tie_word_embeddings is tie


def test_biases_of_a_llama_are_reordered_with_their_rows(tmp_path: Path) -> None:
    """A Llama with attention biases keeps them, in order."""
    source = build_tiny_model("llama", attention_bias=True)
    parameters = load_parameters(write_tiny_gguf(tmp_path / "tiny.gguf", source))
    name = "model.layers.1.self_attn.k_proj.bias"
    assert torch.equal(parameters[name], source.state_dict()[name])


@pytest.mark.parametrize("quantization", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_quantized_blocks_are_decoded(tmp_path: Path, quantization: str) -> None:
    """A matrix has the values that its blocks stand for, in rows as wide as they were."""
    source = build_tiny_model()
    path = write_tiny_gguf(tmp_path / "tiny.gguf", source, quantization=quantization)
    name = "model.layers.0.mlp.down_proj.weight"
    kind = GGMLQuantizationType[quantization]
    expected = dequantize(quantize(source.state_dict()[name].numpy(), kind), kind)
    assert np.array_equal(load_parameters(path)[name].numpy(), expected)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_configuration_equals_the_source(tmp_path: Path, family: str) -> None:
    """Sizes, rope and norms read from metadata are those of the model written."""
    source = build_tiny_model(
        family,
        num_key_value_heads=1,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        rms_norm_eps=1e-5,
    )
    config = read(tmp_path, source)
    assert (config.architecture, config.num_kv_heads, config.head_dim) == (family, 1, 16)
    assert config.max_position_embeddings == 512
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert rope_of(config).inv_freq[1] == pytest.approx(5000 ** (-1 / 8))
    assert config.qkv_bias is (family == "qwen2")
    assert config.qk_norm is (family == "qwen3")


def test_end_of_sequence_ids_come_from_the_tokenizer_fields(tmp_path: Path) -> None:
    """The end of text and the end of a turn both end a sequence."""
    assert read(tmp_path).eos_token_ids == (2,)


def test_divisors_of_the_frequencies_are_applied(tmp_path: Path) -> None:
    """Llama 3.1 files store their rope scaling as one divisor a frequency."""
    plain = read(tmp_path)
    factors = np.linspace(1, 8, 8)
    scaled = read(tmp_path, extra_tensors={"rope_freqs.weight": factors})
    expected = np.array(rope_of(plain).inv_freq) / factors
    np.testing.assert_allclose(rope_of(scaled).inv_freq, expected, rtol=1e-6)


def test_yarn_is_read_from_metadata(tmp_path: Path) -> None:
    """A stretched model gets yarn's frequencies, scaling and length."""
    fields = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 256,
    }
    config = read(tmp_path, fields=fields)
    assert rope_of(config).rope_type == "yarn"
    assert rope_of(config).attention_scaling > 1
    assert config.max_position_embeddings == 1024


def test_linear_scaling_is_read_from_metadata(tmp_path: Path) -> None:
    """Linear scaling divides every frequency."""
    fields = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    assert rope_of(read(tmp_path, fields=fields)).inv_freq[0] == 0.5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope.scaling.type": "magic", "rope.scaling.factor": 2.0}, "rope type 'magic'"),
        ({"rope.scaling.type": "linear"}, r"llama\.rope\.scaling\.factor is None"),
        ({"rope.dimension_count": 8}, "rotating 8 of 16 dimensions"),
        ({"attention.value_length": 8}, r"values of another size than keys \(16\)"),
        ({"attention.head_count_kv": [2, 1]}, r"head_count_kv is \[2, 1\], not one number"),
        ({"block_count": None}, r"llama\.block_count is None"),
        ({"block_count": 3}, r"lacks model\.layers\.2\."),
        ({"block_count": 1}, r"no known use: model\.layers\.1\."),
        ({"embedding_length": 32, "attention.key_length": 16}, "has shape"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    """What is missing, unsupported or contradicts the tensors is named."""
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, fields=fields)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.scale", 0.5),
        ("attention.clamp_kqv", 8.0),
        ("attention.sliding_window", 64),
        ("attn_logit_softcapping", 50.0),
        ("logit_scale", 0.0625),
        ("expert_count", 8),
        ("rope.scaling.yarn_attn_factor", 2.0),
    ],
)
def test_a_field_that_would_be_ignored_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    """Metadata that nobody reads and that is not off would change the computation."""
    with pytest.raises(ModelLoadError, match=rf"GGUF field llama\.{key} \({value}\)"):
        read(tmp_path, fields={key: value})


def test_a_field_that_is_off_is_ignored(tmp_path: Path) -> None:
    """Zero experts, no cap and notes on how the file was made change nothing."""
    fields = {"expert_count": 0, "logit_scale": 1.0, "tensor_data_layout": "Meta AI original pth"}
    assert read(tmp_path, fields=fields).num_layers == 2


def test_the_largest_gemma2_scales_scores_by_its_width(tmp_path: Path) -> None:
    """The format does not store query_pre_attn_scalar: it follows from the number of layers."""
    source = build_tiny_model("gemma2", head_dim=32)
    path = write_tiny_gguf(tmp_path / "small.gguf", source)
    assert GgufModel(path).config.attention_scale == 32**-0.5
    large = write_tiny_gguf(tmp_path / "large.gguf", source, fields={"block_count": 46})
    assert GgufModel(large).config.attention_scale == 16**-0.5


def test_the_pattern_of_windows_may_be_stored(tmp_path: Path) -> None:
    """Gemma's windows follow the family's pattern unless the file has another."""
    source = build_tiny_model("gemma3_text", num_hidden_layers=4)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", source)
    assert GgufModel(path).config.windows == (20, 20, 20, 20)
    fields = {"attention.sliding_window_pattern": 3}
    path = write_tiny_gguf(tmp_path / "tiny.gguf", source, fields=fields)
    assert GgufModel(path).config.windows == (20, 20, None, 20)


def test_experts_are_refused(tmp_path: Path) -> None:
    """A mixture of experts shares the architecture's name, but its tensors give it away."""
    with pytest.raises(ModelLoadError, match=r"no known use: blk\.0\.ffn_gate_inp\.weight"):
        read(tmp_path, extra_tensors={"blk.0.ffn_gate_inp.weight": np.zeros((4, 64))})


def test_divisors_of_another_size_are_refused(tmp_path: Path) -> None:
    """One divisor a frequency, no more."""
    with pytest.raises(ModelLoadError, match=r"rope_freqs\.weight has shape \(4,\)"):
        read(tmp_path, extra_tensors={"rope_freqs.weight": np.ones(4)})


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    """The error lists the architectures that can be loaded."""
    source = build_tiny_model()
    source.config.model_type = "gemma"
    with pytest.raises(ModelLoadError, match="'gemma' is not supported; supported: llama, qwen2"):
        read(tmp_path, source)


@pytest.mark.parametrize("size", [0, 3, 40, 5000])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    """Half a download is named, not loaded."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", build_tiny_model())
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ModelLoadError, match=r"cannot read .*tiny\.gguf"):
        load(path)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    """A name ending in .gguf is not enough."""
    path = tmp_path / "fake.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(ModelLoadError, match="magic"):
        load(path)


def test_a_folder_with_one_file_is_that_file(tmp_path: Path) -> None:
    """The folder a model was pulled to can be named instead of the file in it."""
    write_tiny_gguf(tmp_path / "tiny.gguf", build_tiny_model())
    assert load(tmp_path).name == tmp_path.name
    assert load(tmp_path / "tiny.gguf").name == "tiny"


def test_a_folder_with_two_files_is_ambiguous(tmp_path: Path) -> None:
    """Nobody guesses which of two files was meant."""
    for name in ("a.gguf", "b.gguf"):
        write_tiny_gguf(tmp_path / name, build_tiny_model())
    with pytest.raises(ModelLoadError, match=r"2 \.gguf files; name the file"):
        load(tmp_path)
