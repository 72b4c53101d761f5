"""Every supported model computes what transformers computes: logits to 1e-4, greedy ids exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_worker.attention import create_backend
from headrace_worker.model import LoadedModel, load_model
from support.packed import PackedRun, greedy_by_transformers
from support.tiny_gguf import write_tiny_gguf
from support.tiny_models import build_tiny_model

CPU = torch.device("cpu")
LOGIT_TOLERANCE = 1e-4
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-untied-biased-without-groups": (
        "llama",
        {
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 4,
            "head_dim": 32,
        },
    ),
    "llama-three-groups": (
        "llama",
        {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "qwen3-biased-untied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": False}),
    "smollm3": ("smollm3", {}),
    "smollm3-window-biased": (
        "smollm3",
        {
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "phi3-partial-window": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": 20}),
    "gemma2": ("gemma2", {}),
    "gemma2-without-caps-biased": (
        "gemma2",
        {
            "attention_bias": True,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": ("gemma3_text", {}),
    "gemma3-capped-silu": (
        "gemma3_text",
        {"final_logit_softcapping": 3.0, "hidden_activation": "silu", "num_key_value_heads": 1},
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def variant(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel]:
    """A random model as transformers has it, and as loaded from its safetensors."""
    torch.set_num_threads(1)
    family, options = VARIANTS[request.param]
    source = build_tiny_model(family, **options)
    folder = tmp_path_factory.mktemp(request.param)
    source.save_pretrained(folder)
    return source, load_model(folder, dtype=torch.float32, device=CPU).packed()


def draw_prompts(*lengths: int, vocab_size: int = 320) -> list[list[int]]:
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def logits_by_transformers(model: Any, prompt: list[int]) -> torch.Tensor:
    """Return ``[len(prompt), vocab]`` of one prompt computed alone."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0]
    return logits.float()


@pytest.mark.parametrize(
    ("backend_name", "chunk"), [("cpu", 1), ("cpu", 7), ("cpu", 1000), ("reference", 7)]
)
def test_logits_of_known_text(
    variant: tuple[Any, LoadedModel], backend_name: str, chunk: int
) -> None:
    """Logits at every position agree, in one piece, in chunks and token by token, batched."""
    source, model = variant
    prompts = draw_prompts(70, 3, 33)
    run = PackedRun(model, create_backend(backend_name, CPU), prompts)
    for prompt, logits in zip(prompts, run.prefill(chunk), strict=True):
        expected = logits_by_transformers(source, prompt)
        torch.testing.assert_close(logits, expected, atol=LOGIT_TOLERANCE, rtol=0)


def test_greedy_tokens(variant: tuple[Any, LoadedModel]) -> None:
    """A batch of chunks and decodes generates what transformers generates one by one."""
    source, model = variant
    prompts = draw_prompts(40, 1, 19)
    run = PackedRun(model, create_backend(None, CPU), prompts, room=24)
    assert run.generate(24, chunk=16) == [
        greedy_by_transformers(source, prompt, 24) for prompt in prompts
    ]


GGUF_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layer_interval": 4}),
    "phi3": ("phi3", {"tie_word_embeddings": False, "sliding_window": 20}),
    "phi3-longrope": (
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 100,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
                "attention_factor": 1.25,
            },
        },
    ),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "sliding_window_pattern": 6},
    ),
}


@pytest.mark.parametrize("variant_name", GGUF_VARIANTS)
def test_a_gguf_file_computes_what_its_source_does(tmp_path: Path, variant_name: str) -> None:
    """Row order, biases, norms and windows survive the way through a GGUF file (B45)."""
    torch.set_num_threads(1)
    family, options = GGUF_VARIANTS[variant_name]
    source = build_tiny_model(family, **options)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", source)
    model = load_model(path, dtype=torch.float32, device=CPU)
    (prompt,) = draw_prompts(50)
    (logits,) = PackedRun(model, create_backend(None, CPU), [prompt]).prefill(1000)
    expected = logits_by_transformers(source, prompt)
    torch.testing.assert_close(logits, expected, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text"])
def test_bfloat16_rounds_like_transformers(tmp_path: Path, family: str) -> None:
    """In bfloat16, logits differ from transformers' by rounding, not by more."""
    torch.set_num_threads(1)
    source = build_tiny_model(family, hidden_size=72)  # its root is no bfloat16
    source.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, device=CPU)
    (prompt,) = draw_prompts(50)
    run = PackedRun(model, create_backend(None, CPU), [prompt], dtype=torch.bfloat16)
    (logits,) = run.prefill(1000)
    expected = logits_by_transformers(source.to(torch.bfloat16), prompt)
    assert (logits - expected).abs().max() < 0.05 * expected.abs().max()


def test_neighbours_do_not_change_greedy_tokens(tmp_path: Path) -> None:
    """Thirty-two prompts generate the same alone, in fours and all at once (B14)."""
    torch.set_num_threads(1)
    build_tiny_model("llama").save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU)
    prompts = draw_prompts(*range(1, 33))

    def generate(group: list[list[int]]) -> list[list[int]]:
        run = PackedRun(model, create_backend(None, CPU), group, room=16)
        return run.generate(16, chunk=1000)

    together = generate(prompts)
    assert [generate([prompt])[0] for prompt in prompts] == together
    fours = [generate(prompts[i : i + 4]) for i in range(0, 32, 4)]
    assert [ids for group in fours for ids in group] == together
