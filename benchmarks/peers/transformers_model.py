"""Loading a model with transformers, as both of its entries in the comparison do."""

from __future__ import annotations

from typing import Any

from benchmarks.job import Job


def load(job: Job) -> Any:
    """Return the model, ready to generate."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(job.num_threads)
    dtype = getattr(torch, job.dtype)
    model: Any = AutoModelForCausalLM.from_pretrained(job.model, dtype=dtype)
    return model.eval()


def version() -> str:
    """Return what computes."""
    import torch
    import transformers

    return f"transformers {transformers.__version__}, torch {torch.__version__}"
