"""Faults of what stands between tokens and text."""

from __future__ import annotations

from mutations.fault import Fault

_SERVING = "worker/headrace_worker/serving/"

TEXT_FAULTS = (
    Fault(
        "stop string before min_tokens",
        _SERVING + "detokenizer.py",
        "may_stop=self._num_tokens >= self._min_tokens",
        "may_stop=True",
        "tests/unit/test_detokenizer.py::test_no_stop_string_counts_before_min_tokens",
    ),
    Fault(
        "of several ends of a model only the first is known",
        _SERVING + "tokenizer_export.py",
        "found |= set(eos) if isinstance(eos, list) else {eos}",
        "found |= set(eos[:1]) if isinstance(eos, list) else {eos}",
        "tests/unit/test_tokenizer_store.py::test_an_export_is_what_transformers_makes",
    ),
    Fault(
        "chat begins twice",
        _SERVING + "tokenizer.py",
        "return self._encode(text, add_special_tokens=False)",
        "return self._encode(text, add_special_tokens=True)",
        "tests/unit/test_chat.py::test_a_chat_has_exactly_one_bos",
    ),
    Fault(
        "included stop string left out",
        _SERVING + "stop_strings.py",
        "return end if self._include_stop else start",
        "return start",
        "tests/unit/test_stop_strings.py"
        "::test_with_include_stop_the_output_ends_with_the_stop_string",
    ),
)
