"""Faults of what chooses: penalties, masks, draws, log-probabilities, grammars."""

from __future__ import annotations

from mutations.fault import Fault

_ENGINE = "worker/headrace_worker/engine/"
_ORACLE = "tests/unit/test_oracle.py::test_the_engine_answers_what_plain_python_works_out"

SAMPLING_FAULTS = (
    Fault(
        "penalty leaks to the neighbours",
        _ENGINE + "adjust.py",
        "logits[rows, token_ids] -= presence + frequency * counts",
        "logits[:, token_ids] -= presence + frequency * counts",
        "tests/unit/test_sampler.py"
        "::test_what_one_request_asks_for_changes_no_logit_of_its_neighbours",
    ),
    Fault(
        "presence penalty counts the prompt",
        _ENGINE + "adjust.py",
        "        seq.token_ids[seq.num_prompt_tokens :]\n        if spec.presence_penalty",
        "        seq.token_ids\n        if spec.presence_penalty",
        "tests/unit/test_sampler.py::test_presence_and_frequency_count_output_only",
    ),
    Fault(
        "repetition penalty forgets the prompt",
        _ENGINE + "adjust.py",
        "seq.token_ids if penalty != 1 else []",
        "seq.token_ids[seq.num_prompt_tokens :] if penalty != 1 else []",
        "tests/unit/test_sampler.py::test_the_repetition_penalty_counts_prompt_and_output",
    ),
    Fault(
        "bad word masks its last token everywhere",
        _ENGINE + "adjust.py",
        "if len(head) <= seq.num_output_tokens and seq.ends_with(head):",
        "if len(head) <= seq.num_output_tokens:",
        _ORACLE + "[bad_words-sampler]",
    ),
    Fault(
        "seed without the position",
        _ENGINE + "sampler.py",
        "number = uniform(spec.seed, seq.num_tokens)",
        "number = uniform(spec.seed, 0)",
        _ORACLE + "[temperature-sampler]",
    ),
    Fault(
        "top-p off by one",
        _ENGINE + "draw.py",
        "in_top_p = ((ends - weights) < top_p * mass) | (top_p >= 1)",
        "in_top_p = (ends < top_p * mass) | (top_p >= 1)",
        _ORACLE + "[temperature-top_p-sampler]",
    ),
    Fault(
        "min_tokens does not mask the ends",
        _ENGINE + "adjust.py",
        "return bool(seq.stop_token_ids) and seq.num_output_tokens < seq.sampling.min_tokens",
        "return False",
        "tests/unit/test_engine.py::test_any_of_several_end_tokens_stops_but_not_before_min_tokens",
    ),
    Fault(
        "only the first end ends",
        _ENGINE + "sequence.py",
        "frozenset(command.sampling.stop_token_ids)",
        "frozenset(sorted(command.sampling.stop_token_ids)[:1])",
        "tests/unit/test_engine.py::test_any_of_several_end_tokens_stops_but_not_before_min_tokens",
    ),
    Fault(
        "logprobs of the changed logits",
        _ENGINE + "sampler.py",
        "scores = _score(logits, tokens,",
        "scores = _score(adjusted, tokens,",
        "tests/unit/test_sampler.py::test_logprobs_are_those_of_the_model_before_any_adjustment",
    ),
    Fault(
        "prompt scores shifted by one",
        _ENGINE + "prompt_scores.py",
        "offset = end - share.num_new_tokens - seq.num_computed_tokens - 1",
        "offset = end - share.num_new_tokens - seq.num_computed_tokens",
        "tests/unit/test_engine_prompt_scores.py"
        "::test_every_prompt_token_but_the_first_is_scored_once_in_any_chunks",
    ),
    Fault(
        "grammar stands still",
        _ENGINE + "grammar.py",
        "if not self.matcher.consume_token(token_id):",
        "if False:",
        "tests/unit/test_grammar_engine.py::test_whatever_is_drawn_follows_the_grammar",
    ),
)
