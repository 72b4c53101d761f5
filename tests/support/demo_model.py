"""The demo model, SmolLM2-135M, as this project and as transformers load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from headrace_worker.catalogue import MODELS, model_file
from headrace_worker.serving.chat import Chat
from headrace_worker.serving.tokenizer_store import load_tokenizer

NAME = "smollm2-135m"
QUESTIONS = Path(__file__).parents[2] / "examples" / "prompts.jsonl"


def demo_model_path() -> Path:
    """Return the GGUF file that set-up pulls."""
    return model_file(MODELS[NAME])


def questions() -> list[str]:
    """Return the questions that the demo asks."""
    lines = QUESTIONS.read_text().splitlines()
    return [json.loads(line)["body"]["messages"][-1]["content"] for line in lines]


def chat_prompt_ids(*contents: str) -> list[list[int]]:
    """Return each question as the model's chat template writes it, in token ids.

    By our own tokenizer, which the tests of the tokenizer store compare with transformers': that
    one takes seconds to read a GGUF file's vocabulary, three times over.
    """
    tokenizer = load_tokenizer(demo_model_path())
    chats = (Chat([{"role": "user", "content": content}]) for content in contents)
    return [list(tokenizer.encode_plain(tokenizer.render_chat(chat))) for chat in chats]


def demo_model_of_transformers() -> Any:
    """Read the file with transformers' own reader; from_pretrained would ask for accelerate."""
    path = demo_model_path()
    factory: Any = AutoModelForCausalLM  # transformers leaves it untyped
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = factory.from_config(config, dtype=torch.float32)
    read: Any = load_gguf_checkpoint
    tensors = read(path, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()
