"""Loading a model that transformers computes: checked as a whole, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from headrace_worker.engine.errors import SettingsError
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.model import Decoder, LoadedModel, ModelLoadError, load_model
from headrace_worker.model.external import ExternalDecoder
from support.external_models import EXTERNAL_MODELS, MIXTURES, build_external_model
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import build_tiny_model

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype = torch.float32, model_impl: str = "auto") -> LoadedModel:
    """Load what is at the path on the CPU."""
    return load_model(path, dtype=dtype, device=CPU, model_impl=model_impl)


def save(name: str, folder: Path) -> Path:
    """Save one of the tiny models."""
    build_external_model(name).save_pretrained(folder)
    return folder


def write_config(folder: Path, **values: Any) -> Path:
    """Write a configuration alone: what it rules out is refused before any weight is read."""
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random GPT-2."""
    return save("gpt2", tmp_path_factory.mktemp("gpt2"))


def test_auto_prefers_our_own_decoder(gpt2: Path, tmp_path: Path) -> None:
    """A Llama runs natively, a GPT-2 through transformers; a setting can ask for either."""
    build_tiny_model("llama").save_pretrained(tmp_path)
    assert isinstance(load(tmp_path).decoder, Decoder)
    assert isinstance(load(tmp_path, model_impl="transformers").decoder, ExternalDecoder)
    assert isinstance(load(gpt2).decoder, ExternalDecoder)
    with pytest.raises(ModelLoadError, match="model type 'gpt2' is not supported"):
        load(gpt2, model_impl="native")
    with pytest.raises(ModelLoadError, match="unknown model_impl 'vllm'"):
        load(gpt2, model_impl="vllm")


def test_the_shape_is_what_the_layers_showed(gpt2: Path, tmp_path: Path) -> None:
    """Sizes come from the tensors that reach the attention, windows from the model's own masks."""
    config = load(gpt2).config
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("gpt2", 320, 64)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 4)
    assert (config.head_dim, config.intermediate_size) == (16, 256)
    assert (config.windows, config.eos_token_ids) == ((None, None), (2,))
    assert load(save("cohere2-windows", tmp_path)).config.windows == (9, None)


def test_a_window_is_read_at_its_real_size(tmp_path: Path) -> None:
    """One far longer than the trial run is found, and one that covers the context is none."""
    for window, found in ((300, 300), (512, None)):
        build_tiny_model("starcoder2", sliding_window=window).save_pretrained(tmp_path)
        assert load(tmp_path).config.windows == (found, found)


def test_the_context_is_that_of_the_position_table(gpt2: Path) -> None:
    """GPT-2 has learned so many positions; asking for more is refused, not wrapped around."""

    def load_with(max_model_len: int | None) -> int:
        settings = EngineSettings(
            str(gpt2), device="cpu", max_model_len=max_model_len, kv_cache_memory_bytes=2**20
        )
        return load_engine(settings)[1].max_model_len

    assert load_with(None) == 512
    with pytest.raises(SettingsError, match="513 is not in 2 … 512"):
        load_with(513)


@pytest.mark.parametrize("name", ["gpt2", "mixtral-window"])
def test_bfloat16_passes_the_check(tmp_path: Path, name: str) -> None:
    """Rounding alone is not taken for a difference."""
    model = load(save(name, tmp_path), torch.bfloat16)
    assert model.decoder.logits(torch.ones(3, 64, dtype=torch.bfloat16)).shape == (3, 320)


def test_tied_weights_count_once_and_their_packed_copy_too(gpt2: Path, tmp_path: Path) -> None:
    """W of the memory equation is what stays in memory."""
    tied, embedding = load(gpt2), 320 * 64 * 4
    source: Any = AutoModelForCausalLM.from_pretrained(gpt2)
    parameters = sum(parameter.nbytes for parameter in source.parameters())
    assert tied.weights_bytes == tied.packed().weights_bytes
    assert tied.weights_bytes >= parameters + embedding
    untied = build_tiny_model("gpt_neox", tie_word_embeddings=False)
    untied.save_pretrained(tmp_path)
    assert load(tmp_path).weights_bytes - sum(p.nbytes for p in untied.parameters()) < embedding


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("falcon", {}, "FalconForCausalLM does not call its attention through"),
        ("mpt", {}, "MptForCausalLM does not call its attention through"),  # ALiBi
        ("bloom", {}, "BloomForCausalLM does not call"),  # ALiBi
        ("mamba", {}, "MambaForCausalLM does not call"),
        ("stablelm", {}, "StableLmForCausalLM does not call"),
        ("t5", {}, "'t5' has no causal model"),
        ("bert", {"architectures": ["BertForMaskedLM"]}, "'BertForMaskedLM' is not supported"),
        ("deepseek_v3", {}, r"latent attention \(MLA\) is not supported \(kv_lora_rank is 512\)"),
        ("llama4_text", {}, "layer type 'chunked_attention'"),
        ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer type 'conv'"),
        ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "layer type '\\w+'"),
        ("gpt2", {"add_cross_attention": True}, "cross-attention"),
        ("gpt2", {"quantization_config": {"quant_method": "awq"}}, "quantization method 'awq'"),
        ("olmo2", {"max_position_embeddings": None}, "max_position_embeddings"),
        ("no-such-model", {}, "no-such-model"),
        (
            "my-model",
            {"auto_map": {"AutoConfig": "code.MyConfig", "AutoModelForCausalLM": "code.My"}},
            "trust_remote_code|my-model",
        ),
    ],
)
def test_what_would_run_wrong_is_refused_by_name(
    tmp_path: Path, model_type: str, options: dict[str, Any], message: str
) -> None:
    """The configuration is enough to know, so no weight has been read."""
    folder = write_config(
        tmp_path, model_type=model_type, **{"num_hidden_layers": 2, "hidden_size": 64, **options}
    )
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_frequencies_that_follow_the_longest_neighbour_are_refused(tmp_path: Path) -> None:
    """With longrope, a long sequence in the batch would change the tokens of a short one."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32, **factors}
    parameters = {"rope_theta": 10000.0, **rope}
    write_config(
        tmp_path,
        model_type="phi3",
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=64,
        original_max_position_embeddings=32,
        rope_parameters=parameters,
    )
    with pytest.raises(ModelLoadError, match="rope type 'longrope'"):
        load(tmp_path, model_impl="transformers")


def test_several_models_in_one_are_refused(tmp_path: Path) -> None:
    """A model that sees is refused with the names of its parts."""
    folder = write_config(tmp_path, model_type="llava", text_config={"model_type": "gpt2"})
    with pytest.raises(ModelLoadError, match="'llava'"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 2},
         r"^GptOssForCausalLM: attention sinks \(s_aux\) are not supported"),
        ("diffllama", {}, r"layers \[0, 0, 1, 1\] of 2"),
        ("doge", {}, "DogeForCausalLM does not run on packed batches"),
        ("bert", {}, "neither causal nor a sliding window"),
    ],
)  # fmt: skip
def test_what_only_the_layers_show_is_refused_by_name(
    tmp_path: Path, model_type: str, options: dict[str, Any], message: str
) -> None:
    """Sinks, shared layers, masks of their own making and looking ahead are found by a trial."""
    build_tiny_model(model_type, **options).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "mixtral-window"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", "has missing keys: "),
        ("unexpected", "has unexpected keys: extra.weight"),
        ("mismatched", "cannot be loaded|has mismatched keys"),
    ],
)
def test_a_damaged_checkpoint_is_refused(
    tmp_path: Path, name: str, damage: str, message: str
) -> None:
    """No weight is left as it was drawn at random (B42)."""
    file = save(name, tmp_path) / "model.safetensors"
    tensors = load_file(file)
    victim = next(key for key in tensors if "norm" in key or "ln_f" in key)
    if damage == "missing":
        del tensors[victim]
    elif damage == "unexpected":
        tensors["extra.weight"] = torch.ones(3)
    else:
        tensors[victim] = torch.ones(7)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(gpt2: Path, tmp_path: Path) -> None:
    """Nothing is fetched from anywhere."""
    (tmp_path / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    with pytest.raises(ModelLoadError, match="GPT2LMHeadModel cannot be loaded"):
        load(tmp_path)


def test_a_gguf_file_is_for_the_native_decoder(tmp_path: Path) -> None:
    """transformers would read it, but dequantize and reorder it in its own way."""
    path = write_tiny_gguf(tmp_path / "tiny.gguf", build_tiny_model("llama"))
    with pytest.raises(ModelLoadError, match="'transformers' does not read GGUF"):
        load(path, model_impl="transformers")


def test_a_gguf_file_of_another_architecture_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no falling back to another implementation."""
    source = build_tiny_model("llama")
    monkeypatch.setattr(source.config, "model_type", "falcon")
    path = write_tiny_gguf(tmp_path / "tiny.gguf", source)
    with pytest.raises(ModelLoadError, match="GGUF architecture 'falcon'"):
        load(path)


def test_the_mixtures_are_among_the_models() -> None:
    """At least two of the architectures tried are mixtures of experts."""
    assert len(set(MIXTURES) & EXTERNAL_MODELS.keys()) >= 2
