"""Faults of what decides and samples: scheduler, block pool, batch, sampler, sequence, text."""

from __future__ import annotations

from mutations.fault import Fault

_ENGINE = "worker/headrace_worker/engine/"
_SERVING = "worker/headrace_worker/serving/"
_SCHEDULES = (
    "tests/unit/test_engine_state_machine.py"
    "::test_no_random_schedule_changes_a_token_or_loses_a_block[{}]"
)
_ORACLE = "tests/unit/test_oracle.py::test_the_engine_answers_what_plain_python_works_out"

PAGING = (
    Fault(
        "slot off by one",
        _ENGINE + "batch.py",
        "return blocks * block_size + positions % block_size",
        "return blocks * block_size + (positions + 1) % block_size",
        _SCHEDULES.format("lists-1"),
    ),
    Fault(
        "positions off by one after a takeover",
        _ENGINE + "batch.py",
        "positions=(places := torch.tensor(positions, dtype=torch.int64)).to(device),",
        "positions=(places := torch.tensor(positions, dtype=torch.int64)).to(device)"
        " + any(s.seq.num_output_tokens > 0 and s.num_new_tokens > 1 for s in scheduled),",
        "tests/unit/test_engine_blocks.py::test_a_resumed_sequence_goes_on_where_the_log_ends",
    ),
    Fault(
        "cache key without its parent",
        _ENGINE + "block_pool.py",
        'parent + array("Q", token_ids).tobytes()',
        'array("Q", token_ids).tobytes()',
        _SCHEDULES.format("lists-1"),
    ),
    Fault(
        "cache key without the salt",
        _ENGINE + "block_pool.py",
        "return blake2b(salt, digest_size=32",
        'return blake2b(b"", digest_size=32',
        "tests/unit/test_engine_blocks.py::test_tenants_never_share_a_prefix",
    ),
    Fault(
        "trash block handed out",
        _ENGINE + "block_pool.py",
        "self._free = list(range(num_blocks, 0, -1))",
        "self._free = list(range(num_blocks - 1, -1, -1))",
        "tests/unit/test_block_pool.py::test_the_trash_block_is_never_handed_out",
    ),
    Fault(
        "shared block loses a reference",
        _ENGINE + "block_pool.py",
        "                del self._cached[block]\n            self._ref_counts[block] += 1",
        "                del self._cached[block]\n                self._ref_counts[block] += 1",
        _SCHEDULES.format("lists-1"),
    ),
    Fault(
        "stale blocks after a preemption",
        _ENGINE + "sequence.py",
        "self.num_computed_tokens = num_cached_tokens",
        "self.num_computed_tokens = max(\n"
        "            num_cached_tokens, bool(self.num_preemptions) * (self.num_tokens - 1)\n"
        "        )",
        "tests/unit/test_engine_blocks.py"
        "::test_preempted_answers_are_complete_and_nothing_is_said_twice",
    ),
    Fault(
        "waiting sequence counts as computed",
        _ENGINE + "sequence.py",
        "        blocks, self.block_table = self.block_table, []\n"
        "        self.num_computed_tokens = 0\n",
        "        blocks, self.block_table = self.block_table, []\n",
        _SCHEDULES.format("lists-1"),
    ),
    Fault(
        "last, partial block in the prefix cache",
        _ENGINE + "scheduler.py",
        "num_full = seq.num_computed_tokens // self.pool.block_size",
        "num_full = -(-seq.num_computed_tokens // self.pool.block_size)",
        _SCHEDULES.format("lists-1"),
    ),
    Fault(
        "whole prompt taken from the cache",
        _ENGINE + "sequence.py",
        "if self.num_unscored_tokens else self.num_tokens) - 1",
        "if self.num_unscored_tokens else self.num_tokens)",
        _SCHEDULES.format("lists-1"),
    ),
    Fault(
        "oldest preempted instead of the newest",
        _ENGINE + "scheduler.py",
        "victim = max(self.running, key=_rank)",
        "victim = min(self.running, key=_rank)",
        "tests/unit/test_scheduler_preemption.py"
        "::test_the_least_urgent_is_preempted_even_when_it_is_older",
    ),
    Fault(
        "non-final chunk sampled",
        _ENGINE + "scheduler.py",
        "is_last = self.num_new_tokens == self.seq.num_uncomputed_tokens",
        "is_last = True",
        "tests/unit/test_engine.py::test_chunked_prefill_changes_nothing_and_says_nothing_early",
    ),
    Fault(
        "abort frees nothing",
        _ENGINE + "engine.py",
        "                else:\n                    self.scheduler.remove(seq)",
        "",
        "tests/unit/test_engine_blocks.py"
        "::test_an_abort_in_any_state_frees_everything_and_may_be_repeated",
    ),
    Fault(
        "poisoned blocks stay in the cache",
        _ENGINE + "scheduler.py",
        "        if is_poisoned:\n",
        "        if False:\n",
        "tests/unit/test_engine_faults.py"
        "::test_a_poisoned_row_fails_alone_and_its_blocks_serve_nobody",
    ),
)

SAMPLING = (
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
    Fault(
        "stop string before min_tokens",
        _SERVING + "detokenizer.py",
        "may_stop=self._num_tokens >= self._min_tokens",
        "may_stop=True",
        "tests/unit/test_detokenizer.py::test_no_stop_string_counts_before_min_tokens",
    ),
)

ENGINE_FAULTS = (*PAGING, *SAMPLING)
