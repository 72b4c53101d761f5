"""Write a .gguf model down as a folder of safetensors, which is what the peers read.

python -m benchmarks.peers.export GGUF FOLDER DTYPE, in the environment of transformers
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    """Load with transformers, which undoes the quantization, and save model and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source, folder, dtype = Path(arguments[0]), Path(arguments[1]), getattr(torch, arguments[2])
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        dtype=dtype,
        quantization_config=GgufConfig(dequantize=True),
    )
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1:])
