"""Every known failure of other job queues has a test of ours that would see it."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from support.repository import below, tree

# What a user saw, and the tests that replay it. They are named here, not in their docstrings alone,
# because the numbers of the engines' failures are others; "(queue Bnn)" says which are meant.
KNOWN_FAILURES: dict[str, tuple[str, tuple[str, ...]]] = {
    "B1": (
        "a retry writes twice",
        ("test_a_request_survives_the_loss_of_every_reply", "test_lost_replies_double_nothing"),
    ),
    "B2": ("a cancelled wait loses requests", ("test_no_cancellation_is_lost_in_a_call",)),
    "B3": ("a reply goes to another call", ("test_cancelled_calls_do_not_mix_up_replies",)),
    "B4": ("an idle client storms with timeouts", ("test_waiting_is_quiet",)),
    "B5": (
        "a closed idle connection is handed out",
        ("test_idle_connections_that_were_closed_are_replaced",),
    ),
    "B6": (
        "a wrong kind of error ends the loop",
        (
            "test_bugs_of_the_connection_do_not_end_the_reader",
            "test_a_bug_of_the_client_library_is_an_outage_not_the_end",
        ),
    ),
    "B7": (
        "a cancelled call leaks its connection",
        ("test_cancelled_calls_give_their_connections_back",),
    ),
    "B8": ("too many connections", ("test_five_hundred_streams_share_a_handful_of_connections",)),
    "B9": ("a slow reader loses data", ("test_slow_reader_gets_everything",)),
    "B10": (
        "a dead hint is not noticed",
        ("test_a_wish_whose_hint_was_lost_is_seen_at_the_next_look",),
    ),
    "B11": ("a crash blocks until a timeout", ("test_streams_survive_the_kill_of_their_worker",)),
    "B12": (
        "the same id is taken for done, or for new",
        (
            "test_the_same_request_again_is_a_duplicate",
            "test_the_same_id_with_another_payload_is_a_conflict",
            "test_same_payload_joins_the_request_under_way",
            "test_same_payload_after_the_end_reads_the_result_again",
            "test_same_payload_after_the_result_is_gone_is_expired",
        ),
    ),
    "B13": (
        "a wait for a result that is gone hangs",
        ("test_unknown_id_is_not_found", "test_same_payload_after_the_result_is_gone_is_expired"),
    ),
    "B14": (
        "a cancel has no effect",
        (
            "test_a_running_request_is_cancelled_within_a_second",
            "test_a_queued_request_is_cancelled_before_any_worker_sees_it",
        ),
    ),
    "B15": (
        "a worker goes on claiming after SIGTERM",
        (
            "test_sigterm_hands_everything_over_before_a_long_queue",
            "test_sigterm_hands_over_at_once",
        ),
    ),
    "B16": ("a hiccup ends the wait", ("test_stream_survives_connections_that_are_cut",)),
    "B17": ("a long job is delivered again", ("test_a_renewed_lease_is_not_taken_back",)),
    "B18": (
        "two workers run one entry",
        ("test_eight_sweepers_of_many_lapsed_leases_grant_each_epoch_once",),
    ),
    "B19": ("what was claimed is never seen again", ("test_a_vanished_holder_loses_its_requests",)),
    "B20": (
        "no group any more, for ever",
        (
            "test_a_wiped_redis_gets_its_functions_and_groups_back",
            "test_wiped_data_does_not_stop_the_queue",
        ),
    ),
    "B21": ("nothing is consumed after a reconnect", ("test_a_reset_connection_is_replaced",)),
    "B22": ("a restart loses requests", ("test_an_outage_longer_than_the_lease_is_a_pause",)),
    "B23": (
        "a busy worker runs things twice",
        ("test_a_frozen_worker_harms_nothing_when_it_wakes",),
    ),
    "B24": (
        "a restart makes everything wait",
        ("test_an_outage_longer_than_the_lease_is_a_pause",),
    ),
    "B25": (
        "a failover ends the loop",
        (
            "test_a_replica_refuses_for_now",
            "test_streams_go_on_through_failovers",
            "test_an_ordered_failover_loses_nothing",
            "test_a_server_that_is_demoted_for_a_while_is_waited_for",
        ),
    ),
    "B26": ("both complete it", ("test_a_late_finish_after_a_takeover_is_refused",)),
    "B27": (
        "a late call takes from the new holder",
        (
            "test_a_late_renewal_does_not_steal_from_the_new_holder",
            "test_a_late_release_does_not_touch_the_new_holder",
        ),
    ),
    "B28": (
        "what a consumer holds goes with it",
        ("test_a_consumer_with_pending_entries_is_kept",),
    ),
    "B29": ("consumers pile up", ("test_consumers_of_dead_workers_do_not_pile_up",)),
    "B30": (
        "done work leaves something behind",
        (
            "test_much_work_leaves_memory_where_it_was",
            "test_thousands_of_requests_leave_nothing_but_results",
        ),
    ),
    "B31": (
        "eviction takes parts of the queue",
        (
            "test_an_unsafe_eviction_policy_is_refused",
            "test_a_request_without_its_hash_is_reported_lost",
        ),
    ),
    "B32": (
        "a trimmed entry hides others",
        ("test_a_claimed_head_without_its_body_does_not_hide_others",),
    ),
    "B33": ("the depth lies", ("test_depth_is_right_where_the_length_of_a_stream_is_not",)),
    "B34": (
        "old entries come back after a failover",
        (
            "test_what_has_ended_is_not_run_again_when_old_entries_come_back",
            "test_a_lost_group_is_made_again_without_running_anything_twice",
        ),
    ),
    "B35": (
        "full memory loses jobs or stops workers",
        (
            "test_a_full_memory_stops_claims_and_nobody_has_to_restart",
            "test_a_full_memory_stops_new_work_and_lets_running_work_end",
        ),
    ),
    "B36": (
        "one broken lane stops all",
        ("test_a_lane_of_the_wrong_type_is_reported_while_others_go_on",),
    ),
    "B37": (
        "a backlog is skipped",
        ("test_requests_from_before_the_first_worker_are_served",),
    ),
    "B38": (
        "redelivery and retry both run",
        ("test_a_hand_over_and_a_sweep_at_once_are_one_takeover",),
    ),
    "B39": (
        "an error half way repeats what came before",
        (
            "test_an_unusable_log_does_not_stop_the_batch",
            "test_a_bad_item_is_refused_before_the_first_write",
        ),
    ),
    "B40": (
        "a resume after the TTL starts a second run",
        ("test_same_payload_after_the_result_is_gone_is_expired",),
    ),
    "B41": (
        "an error without an end",
        ("test_every_kind_of_failure_has_one_terminal_entry",),
    ),
    "B42": (
        "chunks out of order are errors",
        (
            "test_a_chunk_that_comes_too_early_is_a_gap",
            "test_a_chunk_cut_elsewhere_is_an_overlap",
        ),
    ),
    "B43": ("a client is gone and the engine goes on", ("test_leaving_early_cancels",)),
    "B44": (
        "a dead engine hangs requests, or fails all",
        (
            "test_poison_among_sixty_three_is_the_only_dead_letter",
            "test_an_engine_that_breaks_names_its_batch",
        ),
    ),
    "B45": ("one tenant starves another", ("test_one_tenant_cannot_starve_another",)),
    "B46": ("an abandoned group keeps entries", ("test_an_abandoned_second_group_keeps_nothing",)),
    "B47": (
        "an oversize or hostile message ends the worker",
        (
            "test_hostile_bytes_are_undecodable",
            "test_bomb_costs_less_memory_than_twice_the_largest_payload",
            "test_bad_requests_get_one_typed_answer_and_neighbours_none_the_worse",
            "test_bombs_are_answered_and_cost_the_worker_little",
        ),
    ),
    "B48": (
        "a command is trusted by the server's version",
        (
            "test_the_library_uses_commands_that_the_floor_has",
            "test_nobody_asks_which_version_the_server_has",
        ),
    ),
    "B49": (
        "healthy work is recovered, orphans are not",
        (
            "test_a_rolling_restart_recovers_nothing_that_is_not_lost",
            "test_a_live_lease_is_left_alone",
        ),
    ),
    "B50": (
        "a result's time runs from the enqueue",
        ("test_a_result_is_kept_for_its_ttl_however_long_it_waited",),
    ),
}


@cache
def docstrings() -> dict[str, str]:
    """Return the docstrings of all tests, by name."""
    return {
        node.name: ast.get_docstring(node) or ""
        for path in below("tests")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


@pytest.mark.parametrize("row", KNOWN_FAILURES, ids=lambda row: f"{row}-{KNOWN_FAILURES[row][0]}")
def test_a_known_failure_of_queues_has_its_tests(row: str) -> None:
    """Each test that a row names is there."""
    _, names = KNOWN_FAILURES[row]
    missing = [name for name in names if name not in docstrings()]
    assert names
    assert not missing


def test_the_rows_of_queues_are_all_there() -> None:
    """Fifty of them."""
    assert list(KNOWN_FAILURES) == [f"B{number}" for number in range(1, 51)]


def test_a_test_that_names_a_row_of_queues_is_named_by_it() -> None:
    """A docstring with "(queue Bnn)" and the table agree."""
    named = {
        (row, name)
        for name, text in docstrings().items()
        for row in re.findall(r"\bqueue (B\d+)\b", text)
    }
    assert named
    assert {(row, name) for row, name in named if name not in KNOWN_FAILURES[row][1]} == set()
