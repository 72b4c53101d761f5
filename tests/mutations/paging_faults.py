"""Faults of what decides: scheduler, block pool, batch, sequence, engine."""

from __future__ import annotations

from mutations.fault import Fault

_ENGINE = "worker/headrace_worker/engine/"
_SCHEDULES = (
    "tests/unit/test_engine_state_machine.py"
    "::test_no_random_schedule_changes_a_token_or_loses_a_block[{}]"
)

PAGING_FAULTS = (
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
        "positions=to_device(places := _int64(positions), device),",
        "positions=to_device(places := _int64(positions), device)"
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
        "num_full = num_computed_tokens // self.pool.block_size",
        "num_full = -(-num_computed_tokens // self.pool.block_size)",
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
        "newcomer waits for a prefix that nobody computes",
        _ENGINE + "scheduler.py",
        "return step.filled.issuperset(self._digests(seq, end)[num_cached_blocks:])",
        "return True",
        _SCHEDULES.format("lists-1"),
    ),
    Fault(
        "non-final chunk sampled",
        _ENGINE + "schedule.py",
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
        "answer that was over goes on after a takeover",
        _ENGINE + "engine.py",
        "if seq.ended and not seq.num_unscored_tokens:\n            self._finished.append(",
        "if False:\n            self._finished.append(",
        "tests/unit/test_engine_blocks.py"
        "::test_a_resumed_sequence_that_was_over_finishes_without_a_forward",
    ),
    Fault(
        "NaN before the last token goes unnoticed",
        _ENGINE + "runner.py",
        "if not bool(is_finite.all()):",
        "if False:",
        "tests/equivalence/test_nan_rows.py::test_what_a_failed_request_computed_is_not_found_again",
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
