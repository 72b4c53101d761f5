"""Reading a model's configuration: every option becomes a flag or a size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace_worker.model import ModelLoadError
from headrace_worker.model.config import read_config
from support.model_configs import YARN, read


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


def test_smollm3_leaves_every_fourth_layer_unrotated(tmp_path: Path) -> None:
    """no_rope_layers holds a 1 where a layer rotates; by default every fourth does not."""
    plain = read(tmp_path, model_type="smollm3")
    assert [rope is None for rope in plain.ropes] == [False, False, False, True]
    chosen = read(tmp_path, model_type="smollm3", no_rope_layers=[0, 1, 1, 0])
    assert [rope is None for rope in chosen.ropes] == [True, False, False, True]


def test_gemma_alternates_windows(tmp_path: Path) -> None:
    """Gemma 2 slides in every other layer, Gemma 3 in five of six, or as its pattern says."""
    assert read(tmp_path, model_type="gemma2", sliding_window=9).windows == (9, None, 9, None)
    gemma3 = {"model_type": "gemma3_text", "sliding_window": 9}
    assert read(tmp_path, **gemma3, num_hidden_layers=6).windows == (9, 9, 9, 9, 9, None)
    assert read(tmp_path, **gemma3, sliding_window_pattern=3).windows == (9, 9, None, 9)


def test_gemma_has_its_own_scales(tmp_path: Path) -> None:
    """Scores are scaled by query_pre_attn_scalar, the embedding by the root of its width."""
    config = read(tmp_path, model_type="gemma2", query_pre_attn_scalar=100)
    assert (config.attention_scale, config.embedding_scale) == (0.1, 8.0)
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert config.activation == "gelu_pytorch_tanh"
    llama = read(tmp_path)
    assert (llama.attention_scale, llama.embedding_scale, llama.logits_soft_cap) == (
        0.25,
        None,
        None,
    )


def test_soft_caps_may_be_off(tmp_path: Path) -> None:
    """A cap of null bounds nothing."""
    caps: dict[str, Any] = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = read(tmp_path, model_type="gemma2", **caps)
    assert (config.attention_soft_cap, config.logits_soft_cap) == (None, None)


@pytest.mark.parametrize("spelling", ["old", "new"])
def test_gemma3_has_two_rotary_bases(tmp_path: Path, spelling: str) -> None:
    """Local and global layers get their own base and scaling, from either spelling."""
    scaling = {"rope_type": "linear", "factor": 8.0}
    fields: dict[str, Any] = {
        "rope_theta": 5e5,
        "rope_local_base_freq": 2e3,
        "rope_scaling": scaling,
    }
    if spelling == "new":
        local = {"rope_type": "default", "rope_theta": 2e3}
        far = {"rope_theta": 5e5, **scaling}
        fields = {"rope_parameters": {"sliding_attention": local, "full_attention": far}}
    config = read(
        tmp_path, model_type="gemma3_text", head_dim=16, sliding_window_pattern=4, **fields
    )
    first, *_, last = config.ropes
    assert first is not None
    assert last is not None
    assert (first.inv_freq[0], last.inv_freq[0]) == (1.0, 0.125)
    assert first.inv_freq[1] == pytest.approx(2e3 ** (-1 / 8))
    assert last.inv_freq[1] == pytest.approx(5e5 ** (-1 / 8) / 8)
    assert config.ropes[1] == first


def test_phi_rotates_a_part_of_each_head(tmp_path: Path) -> None:
    """partial_rotary_factor leaves the rest of a head as it is."""
    config = read(tmp_path, model_type="phi3", partial_rotary_factor=0.75, pad_token_id=0)
    assert config.ropes[0] is not None
    assert len(config.ropes[0].inv_freq) == 6
    assert config.head_dim == 16


def test_lengths_at_which_frequencies_change_are_the_limit(tmp_path: Path) -> None:
    """Beyond them longrope and dynamic turn the tokens already computed by other angles."""
    assert read(tmp_path).length_limit_reason is None
    dynamic = read(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    assert dynamic.max_position_embeddings == 256
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    longrope = read(
        tmp_path,
        rope_scaling={"rope_type": "longrope", "original_max_position_embeddings": 64, **factors},
    )
    assert longrope.max_position_embeddings == 64
    for rope_type, config in (("dynamic", dynamic), ("longrope", longrope)):
        assert config.length_limit_reason is not None
        assert f"rope type '{rope_type}'" in config.length_limit_reason


def test_yarn_takes_its_stretched_length(tmp_path: Path) -> None:
    """A configuration that kept the length before the stretching means the stretched one."""
    config = read(tmp_path, max_position_embeddings=64, rope_scaling=YARN)
    assert (config.max_position_embeddings, config.length_limit_reason) == (256, None)


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


def test_a_configuration_is_frozen(tmp_path: Path) -> None:
    """Nobody changes a configuration after it was checked."""
    config = read(tmp_path)
    with pytest.raises(AttributeError):
        config.num_layers = 1  # type: ignore[misc]
