"""Loading safetensors: every parameter is filled from the file, or loading fails by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_worker.model import ModelLoadError, load_model
from support.native import config_of, decoder_of, load, load_parameters
from support.tiny_models import build_tiny_model, make_tiny_llama, make_tiny_model

CPU = torch.device("cpu")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]


def edit(folder: Path, change: Callable[[Tensors], object]) -> None:
    """Apply ``change`` to the tensors of a saved model."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize("tie", [True, False])
def test_every_tensor_arrives_in_its_place(tmp_path: Path, tie: bool) -> None:
    """Each tensor of the file equals the part of the fused weights that its name stands for."""
    parameters = load_parameters(make_tiny_llama(tmp_path, tie=tie))
    stored = load_file(tmp_path / "model.safetensors")
    assert parameters.keys() == stored.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in stored.items())


def test_biases_and_head_norms_are_loaded(tmp_path: Path) -> None:
    """Qwen2's biases and Qwen3's norms are parameters like all others."""
    for family, name in (("qwen2", "self_attn.k_proj.bias"), ("qwen3", "self_attn.q_norm.weight")):
        folder = make_tiny_model(tmp_path / family, family)
        stored = load_file(folder / "model.safetensors")
        parameter = load_parameters(folder)[f"model.layers.1.{name}"]
        assert torch.equal(parameter, stored[f"model.layers.1.{name}"])


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    """A float32 file loads as bfloat16 with torch's rounding, in half the memory."""
    folder = make_tiny_llama(tmp_path)
    model = load(folder, torch.bfloat16)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(decoder_of(model).embedding, stored[EMBEDDING].bfloat16())
    assert model.weights_bytes * 2 == load(folder).weights_bytes


def test_a_tied_model_needs_no_head(tmp_path: Path) -> None:
    """With tied embeddings the head is the embedding itself, counted once (B42)."""
    model = load(make_tiny_llama(tmp_path))
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    assert decoder_of(model).head.weight is decoder_of(model).embedding


def test_a_tied_model_may_carry_an_equal_head(tmp_path: Path) -> None:
    """A redundant copy of the embedding is recognised, and takes no memory (B42)."""
    edit(make_tiny_llama(tmp_path), lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    model = load(tmp_path)
    assert config_of(model).tie_word_embeddings
    assert decoder_of(model).head.weight is decoder_of(model).embedding


def test_a_tied_model_with_another_head_uses_it(tmp_path: Path) -> None:
    """Where the file contradicts the flag, the weights win, as in transformers (B42)."""
    edit(make_tiny_llama(tmp_path), lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
    model = load(tmp_path)
    assert not config_of(model).tie_word_embeddings
    assert torch.equal(decoder_of(model).head.weight, decoder_of(model).embedding + 1)


def test_a_tied_model_may_name_its_matrix_after_the_head(tmp_path: Path) -> None:
    """The one matrix of a tied model is found under either name."""
    edit(make_tiny_llama(tmp_path), lambda t: t.update({HEAD: t.pop(EMBEDDING)}))
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(decoder_of(load(tmp_path)).embedding, stored[HEAD])


def test_an_untied_model_without_head_is_refused(tmp_path: Path) -> None:
    """A head is never made up: the error names the tensor and the flag (B42)."""
    edit(make_tiny_llama(tmp_path, tie=False), lambda t: t.pop(HEAD))
    with pytest.raises(ModelLoadError, match=r"lacks lm_head.weight \(tie_word_embeddings is fal"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight", EMBEDDING]
)
def test_a_missing_tensor_is_refused(tmp_path: Path, name: str) -> None:
    """No parameter stays unfilled."""
    edit(make_tiny_llama(tmp_path), lambda t: t.pop(name))
    with pytest.raises(ModelLoadError, match=f"the checkpoint lacks {name}"):
        load(tmp_path)


def test_many_missing_tensors_are_summed_up(tmp_path: Path) -> None:
    """An almost empty file gives a short message."""
    edit(make_tiny_llama(tmp_path), lambda t: [t.pop(n) for n in list(t) if "layers" in n])
    with pytest.raises(ModelLoadError, match="and 13 more"):
        load(tmp_path)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    """A bias that the configuration does not mention would change results: it is not dropped."""
    name = "model.layers.0.self_attn.q_proj.bias"
    edit(make_tiny_llama(tmp_path), lambda t: t.update({name: torch.zeros(64)}))
    with pytest.raises(ModelLoadError, match=f"no known use: {name}"):
        load(tmp_path)


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    """Old checkpoints carry what follows from the configuration."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(make_tiny_llama(tmp_path), lambda t: t.update({name: torch.zeros(8)}))
    assert load(tmp_path).config.num_layers == 2


def test_another_shape_is_refused(tmp_path: Path) -> None:
    """Both shapes are in the message."""
    name = "model.layers.0.mlp.down_proj.weight"
    edit(make_tiny_llama(tmp_path), lambda t: t.update({name: torch.zeros(64, 96)}))
    with pytest.raises(ModelLoadError, match=rf"{name} has shape \(64, 96\).* \(64, 128\)"):
        load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_tensors_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    """A matrix stored in a quantized dtype is not taken for plain numbers."""
    name = "model.layers.0.mlp.up_proj.weight"
    edit(make_tiny_llama(tmp_path), lambda t: t.update({name: torch.zeros(128, 64).to(dtype)}))
    with pytest.raises(ModelLoadError, match=f"{name} is stored as {dtype}"):
        load(tmp_path)


def test_a_sharded_model_equals_the_whole(tmp_path: Path) -> None:
    """An index with many files gives the same weights as one file."""
    model = build_tiny_model()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="60KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    whole = load_parameters(tmp_path / "one")
    sharded = load_parameters(tmp_path / "many")
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_a_missing_shard_is_refused(tmp_path: Path) -> None:
    """The error names the file that the index promises."""
    build_tiny_model().save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=shard.name):
        load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    """Nobody guesses which of two values is meant."""
    build_tiny_model().save_pretrained(tmp_path, max_shard_size="60KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    save_file({**load_file(second), name: torch.zeros(1)}, second)
    with pytest.raises(ModelLoadError, match=f"{second.name} holds {name}, and so does another"):
        load(tmp_path)


def test_a_shard_without_a_promised_tensor_is_refused(tmp_path: Path) -> None:
    """What the index promises and no file holds is missing."""
    build_tiny_model().save_pretrained(tmp_path, max_shard_size="60KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    tensors = load_file(shard)
    name, _ = tensors.popitem()
    save_file(tensors, shard)
    with pytest.raises(ModelLoadError, match=f"the checkpoint lacks {name}"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["phi3", "gemma2", "gemma3_text", "smollm3"])
def test_every_family_arrives_in_its_place(tmp_path: Path, family: str) -> None:
    """Fused projections and the norms of each family have the values of the file."""
    folder = make_tiny_model(tmp_path, family)
    parameters = load_parameters(folder)
    stored = load_file(folder / "model.safetensors")
    assert parameters.keys() == stored.keys()
    assert all(torch.equal(parameters[name], tensor) for name, tensor in stored.items())


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": []}'])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    """An index that is no map of tensors to files is named."""
    make_tiny_llama(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelLoadError, match="is no index of safetensors files"):
        load(tmp_path)


def test_an_index_cannot_point_outside_the_folder(tmp_path: Path) -> None:
    """Only the last part of a shard's name counts."""
    folder = make_tiny_llama(tmp_path / "model")
    index = {"weight_map": {"x": "../model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load(folder).config.num_layers == 2


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    """Half a download is named, not loaded."""
    file = make_tiny_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        load(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    """A configuration alone is no model."""
    (make_tiny_llama(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"has neither model\.safetensors nor"):
        load(tmp_path)


@pytest.mark.parametrize("source", ["no/such/model", "nothing-here"])
def test_a_source_that_does_not_exist_is_refused(source: str) -> None:
    """The error names what was asked for."""
    with pytest.raises(ModelLoadError, match=f"no model at '{source}'"):
        load_model(source, dtype=torch.float32, device=CPU)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Only .gguf files are loaded as files."""
    file = tmp_path / "model.bin"
    file.write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"neither a folder nor a \.gguf file"):
        load(file)


def test_a_dtype_the_device_does_not_run_is_refused(tmp_path: Path) -> None:
    """float16 is for CUDA, and integers are for nobody."""
    for dtype in (torch.float16, torch.int8):
        with pytest.raises(ModelLoadError, match=f"{dtype} is not supported on device 'cpu'"):
            load(tmp_path, dtype)


def test_a_model_is_called_by_its_folder_unless_named(tmp_path: Path) -> None:
    """The name is for logs and answers."""
    folder = make_tiny_llama(tmp_path / "tiny")
    assert load(folder).name == "tiny"
    assert load_model(folder, dtype=torch.float32, device=CPU, name="mine").name == "mine"
