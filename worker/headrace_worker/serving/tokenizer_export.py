"""Write a model's tokenizer down in the form that the transport process reads.

``python -m headrace_worker.serving.tokenizer_export MODEL FOLDER``. AutoTokenizer knows how each
family of models wants its tokenizer built, and brings in torch: 2 s, 250 MB. So it runs once, in a
process of its own, and what it made is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from headrace_worker.gguf_file import GgufFile
from headrace_worker.serving.tokenizer import CONFIG_FILE, VOCABULARY_FILE, TokenizerConfig

_GGUF_ENDS = ("eos", "eot", "eom")  # of sequence, of turn, of message


def export(model: Path, folder: Path) -> None:
    """Write VOCABULARY_FILE and CONFIG_FILE of a folder or .gguf file into an existing folder.

    Raises ValueError or OSError where transformers cannot make a fast tokenizer of it.
    """
    tokenizer = load_reference(model)
    config = TokenizerConfig(
        chat_template=_template(tokenizer, "default"),
        tool_template=_template(tokenizer, "tool_use"),
        special_tokens={name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=frozenset({tokenizer.eos_token_id, *_configured_eos(model)} - {None}),
    )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{type(tokenizer).__name__} has no fast tokenizer")
    backend.save(str(folder / VOCABULARY_FILE))
    (folder / CONFIG_FILE).write_text(config.to_json(), "utf-8")


def load_reference(model: Path) -> Any:
    """Return the tokenizer that transformers would use; code that comes with a model is not run."""
    factory: Any = AutoTokenizer  # transformers leaves it untyped
    if model.suffix == ".gguf":
        return factory.from_pretrained(str(model.parent), gguf_file=model.name)
    return factory.from_pretrained(str(model), trust_remote_code=False, local_files_only=True)


def _template(tokenizer: Any, name: str) -> str | None:
    """Return one of a model's chat templates; a lone one is the default."""
    templates = tokenizer.chat_template or {}
    named = templates if isinstance(templates, dict) else {"default": templates}
    return str(named[name]) if name in named else None


def _configured_eos(model: Path) -> set[int]:
    """Return the end-of-sequence ids that stand beside the tokenizer's own; models have several."""
    if model.suffix == ".gguf":
        fields = GgufFile(model).fields
        keys = (f"tokenizer.ggml.{name}_token_id" for name in _GGUF_ENDS)
        return {int(fields[key]) for key in keys if key in fields}
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (file := model / name).is_file():
            eos = json.loads(file.read_text("utf-8")).get("eos_token_id")
            found |= set(eos) if isinstance(eos, list) else {eos}
    return found - {None}


def main(arguments: list[str]) -> int:
    """Export; the exit code says whether it worked, and stderr why not."""
    model, folder = map(Path, arguments)
    try:
        export(model, folder)
    except (ValueError, OSError, ImportError, LookupError) as error:
        reason = " ".join(str(error).split())  # one line: the caller quotes the last one
        sys.stderr.write(f"{type(error).__name__}: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
