"""SmolLM2-135M, which by itself says anything, answers in the form that it is given."""

from __future__ import annotations

import json
import re

import pytest
import torch

from headrace_worker.engine.engine import Engine
from headrace_worker.engine.loader import load_engine
from headrace_worker.engine.messages import SequenceFinish
from headrace_worker.engine.settings import EngineSettings
from headrace_worker.serving.response_format import make_grammar
from headrace_worker.serving.tokenizer import VOCABULARY_FILE, Tokenizer
from headrace_worker.serving.tokenizer_store import load_tokenizer, tokenizer_folder
from support.demo_model import chat_prompt_ids, demo_model_path
from support.grammars import run_grammars
from support.oracle import request

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "country": {"enum": ["France", "Japan", "Peru"]},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 99_999_999},
    },
    "required": ["name", "country", "inhabitants"],
    "additionalProperties": False,
}
FORMS = (
    {"type": "json_schema", "json_schema": {"schema": CITY}},
    {"type": "regex", "regex": r"The capital is [A-Z][a-z]{1,14}\."},
    {"type": "choice", "choice": ["yes", "no", "I do not know"]},
)


def load_demo_engine(tokenizer: Tokenizer) -> Engine:
    """Load it as a worker does."""
    path = demo_model_path()
    engine, _ = load_engine(
        EngineSettings(
            model=str(path),
            device="cpu",
            dtype="float32",
            num_threads=1,
            kv_cache_memory_bytes=64 * 1024 * 1024,
            sampled_vocab_size=tokenizer.vocab_size,
            tokenizer_file=str(tokenizer_folder(path) / VOCABULARY_FILE),
            eos_token_ids=tuple(tokenizer.eos_token_ids),
        )
    )
    return engine


@pytest.mark.model
@pytest.mark.timeout(300)
def test_answers_have_their_form_beside_one_that_has_none() -> None:
    """A schema, an expression and a choice in one batch, greedy, with an answer that is free."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(demo_model_path())
    prompts = chat_prompt_ids("Tell me about Paris.", "What is the capital of France?", "Is it?")
    commands = [
        request(i, prompt, max_tokens=60, grammar=make_grammar(form))
        for i, (prompt, form) in enumerate(zip(prompts, FORMS, strict=True))
    ]
    free = request(9, prompts[0], max_tokens=5)
    answers = run_grammars(load_demo_engine(tokenizer), *commands, free)
    city, capital, choice = (tokenizer.decode(answers.tokens[i]) for i in range(3))
    assert [answers.finished[i] for i in range(3)] == [SequenceFinish.STOP] * 3
    assert list(json.loads(city)) == CITY["required"]
    assert re.fullmatch(str(FORMS[1]["regex"]), capital)
    assert choice in ("yes", "no", "I do not know")
    assert len(answers.tokens[9]) == 5
