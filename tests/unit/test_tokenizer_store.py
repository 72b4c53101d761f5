"""A tokenizer is exported once, as transformers makes it, and loaded without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigurationError
from headrace.folders import models_folder
from headrace_worker.serving import tokenizer_store
from headrace_worker.serving.chat import Chat
from headrace_worker.serving.tokenizer import CONFIG_FILE, VOCABULARY_FILE, Tokenizer
from headrace_worker.serving.tokenizer_export import load_reference, main
from headrace_worker.serving.tokenizer_store import fingerprint, load_tokenizer
from support.tokenizers import (
    BOS,
    CONFIG,
    sentence_piece_backend,
)

TEXTS = ("a", " a", "\n", "  two  spaces", "Hello world", "<pad>text", "客 🌶 é", "\t\0")
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model's folder as transformers saves it, without weights."""
    from transformers import PreTrainedTokenizerFast

    factory: Any = PreTrainedTokenizerFast
    fast = factory(tokenizer_object=sentence_piece_backend(), bos_token=BOS, eos_token="</s>")
    fast.chat_template = CONFIG.chat_template
    fast.save_pretrained(tmp_path / "model")
    (tmp_path / "model/config.json").write_text('{"model_type": "llama", "eos_token_id": 1}')
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    return tmp_path / "model"


def test_an_export_is_what_transformers_makes(model: Path, tmp_path: Path) -> None:
    """Ids and chats are AutoTokenizer's, and B27: generation config ends count, too."""
    (made := tmp_path / "made").mkdir()
    assert main([str(model), str(made)]) == 0
    tokenizer, reference = Tokenizer.from_folder(made), load_reference(model)
    for text in TEXTS:
        assert list(tokenizer.encode(text)) == reference.encode(text)
    chat = reference.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert list(tokenizer.encode_plain(tokenizer.render_chat(Chat([USER])))) == chat
    assert tokenizer.eos_token_ids == {1, 5, 9}


def test_a_template_for_tools_is_exported_beside_the_other(model: Path, tmp_path: Path) -> None:
    """Of a model with several templates, chats with tools take the one called tool_use."""
    (folder := model / "additional_chat_templates").mkdir()
    (model / "chat_template.jinja").write_text("plain")
    (folder / "tool_use.jinja").write_text("{{ tools[0].name }}")
    (made := tmp_path / "made").mkdir()
    assert main([str(model), str(made)]) == 0
    tokenizer = Tokenizer.from_folder(made)
    chats = [Chat([USER]), Chat([USER], tools=[{"name": "look_up"}])]
    assert [tokenizer.render_chat(chat) for chat in chats] == ["plain", "look_up"]


def test_an_export_is_made_once(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second load reads the first one's files."""
    exports: list[Path] = []

    def export_here(model: Path, folder: Path) -> None:
        exports.append(folder)
        assert main([str(model), str(folder)]) == 0

    monkeypatch.setattr(tokenizer_store, "_run", export_here)
    ids = [load_tokenizer(model, tmp_path / "cache").encode("Hello world") for _ in range(2)]
    assert (ids[0], len(exports)) == (ids[1], 1)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [fingerprint(model)]


def test_a_broken_export_is_made_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without its last file does not count."""
    monkeypatch.setattr(
        tokenizer_store, "_run", lambda model, folder: main([str(model), str(folder)])
    )
    cache = tmp_path / "cache"
    (cache / fingerprint(model)).mkdir(parents=True)
    (cache / fingerprint(model) / VOCABULARY_FILE).write_text("{")
    assert load_tokenizer(model, cache).encode("Hello")
    assert (cache / fingerprint(model) / CONFIG_FILE).is_file()


def test_a_changed_file_is_another_tokenizer(model: Path) -> None:
    """Any file that the tokenizer is made of changes its fingerprint."""
    before = fingerprint(model)
    (model / "chat_template.jinja").write_text("{{ 'other' }}")
    assert fingerprint(model) != before


def test_a_model_without_tokenizer_is_refused_in_transformers_words(tmp_path: Path) -> None:
    """The export's last words are in the error, and nothing is left in the cache."""
    (empty := tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=r"empty has no tokenizer.*ValueError: \w+"):
        load_tokenizer(empty, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_an_export_that_hangs_is_given_up(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker does not wait for ever; the message says for how long it did."""
    monkeypatch.setattr(tokenizer_store, "_EXPORT_TIMEOUT_S", 0.01)
    with pytest.raises(ConfigurationError, match=r"more than 0\.01 s"):
        load_tokenizer(model, tmp_path / "cache")


def test_a_worker_loads_its_tokenizer_without_torch(model: Path, tmp_path: Path) -> None:
    """A fresh interpreter that loads, encodes and renders has not imported torch."""
    script = (
        "import sys; from pathlib import Path;"
        "from headrace_worker.serving.chat import Chat;"
        "from headrace_worker.serving.tokenizer_store import load_tokenizer;"
        f"t = load_tokenizer(Path({str(model)!r}), Path({str(tmp_path / 'cache')!r}));"
        "t.encode('Hello'); t.render_chat(Chat([{'role': 'user', 'content': 'Hi'}]));"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def demo() -> tuple[Tokenizer, Any]:
    """Return the demo model's tokenizer, ours and transformers'."""
    (file,) = (models_folder(os.environ) / "smollm2-135m").glob("*.gguf")
    return load_tokenizer(file), load_reference(file)


@pytest.mark.model
def test_the_demo_model_s_ids_are_those_of_transformers(demo: tuple[Tokenizer, Any]) -> None:
    """Raw text and chats of SmolLM2 encode as AutoTokenizer encodes them."""
    tokenizer, reference = demo
    for text in (*TEXTS, "def f(x):\n    return x ** 2\n", "<|im_start|>user\n1234567"):
        assert list(tokenizer.encode(text)) == reference.encode(text)
    chat = reference.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert list(tokenizer.encode_plain(tokenizer.render_chat(Chat([USER])))) == chat


@pytest.mark.model
def test_the_demo_model_s_text_is_that_of_transformers(demo: tuple[Tokenizer, Any]) -> None:
    """Every id of SmolLM2 decodes as transformers decodes it, alone and among others."""
    tokenizer, reference = demo
    ids = list(range(tokenizer.vocab_size))
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)
    assert [tokenizer.decode([i]) for i in ids[:2000]] == [
        reference.decode([i], skip_special_tokens=True) for i in ids[:2000]
    ]


@pytest.mark.model
def test_the_demo_model_ends_its_turns(demo: tuple[Tokenizer, Any]) -> None:
    """SmolLM2 ends with <|im_end|>, which is special and no text."""
    tokenizer, reference = demo
    assert tokenizer.eos_token_ids == {reference.eos_token_id}
    assert all(tokenizer.is_special(i) for i in tokenizer.eos_token_ids)
