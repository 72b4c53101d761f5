"""Copies between host and device: on a CPU there is nothing to wait for, and nothing is lost."""

from __future__ import annotations

import torch

from headrace_worker.engine.sample_ahead import SampledAhead
from headrace_worker.engine.sampler import sample
from headrace_worker.engine.sequence import Sequence
from headrace_worker.engine.transfer import HostCopy, to_device
from support.oracle import request
from support.oracle_requests import WISHES

CPU = torch.device("cpu")


def test_a_copy_holds_what_was_sent_in_its_order() -> None:
    """Values, dtypes and shapes arrive as they were."""
    sent = torch.arange(6).view(2, 3), torch.tensor([True, False])
    arrived = HostCopy(*(to_device(tensor, CPU) for tensor in sent)).wait()
    assert all(torch.equal(one, other) for one, other in zip(sent, arrived, strict=True))


def test_tokens_sampled_ahead_are_the_sampler_s() -> None:
    """Greedy, drawn, filtered, biased and masked, beside a row that is not finite."""
    wishes = [wish for wish in WISHES if not {"logprobs", "prompt_logprobs"} & wish.keys()]
    seqs = [
        Sequence(request(i, [i, 2, 3], temperature=1.0 * (i % 2), **(wish or {})), arrival=i)
        for i, wish in enumerate([{**w} for w in wishes if "temperature" not in w], start=1)
    ]
    logits = torch.randn(len(seqs), 64, generator=torch.Generator().manual_seed(3))
    logits[2] = float("nan")
    ahead = SampledAhead(logits, seqs)
    assert ahead.collect() == sample(logits, seqs)
    assert ahead.corrected == frozenset()
    assert int(ahead.tokens.max()) < 64
