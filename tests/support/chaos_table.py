"""The fault matrix: a closed table, one row a fault, with its sizes, short and full."""

from __future__ import annotations

from support.chaos_ask_faults import (
    enqueue_the_same,
    kill_producers,
    poison,
    sleep_while_reading,
)
from support.chaos_disk_faults import ONE_FILE, cut_power, fill_disk
from support.chaos_failover import fail_over
from support.chaos_fault import Fault
from support.chaos_network_faults import (
    lose_replies,
    reset_connections,
    silence_clients,
    silence_worker,
    trouble_line,
)
from support.chaos_real_streams import kill_real_workers, lacks_model
from support.chaos_red import kill_textbook_workers
from support.chaos_redis_faults import (
    EVERY_SECOND,
    fill_redis,
    kill_redis,
    restart_redis,
    stop_redis_for_long,
    wipe_redis,
)
from support.chaos_result import Size
from support.chaos_room_faults import crowd_out, displace, exhaust_blocks
from support.chaos_soak import BATCH, soak
from support.chaos_worker_faults import (
    freeze_workers,
    kill_workers,
    stop_engines,
    terminate_workers,
)

SLACK = 4.0  # a test run shares its machine with other tests

FAULTS = (
    Fault(
        "worker-kill",
        "SIGKILL of a worker at a random token",
        "0 lost, 0 wrong, gap p99 ≤ L + L/4 + 1 s, ≤ 8 tokens of a request made again",
        kill_workers,
        short=Size(40, rounds=2, tokens=60, slack=SLACK),
        full=Size(10_000, rounds=100),
    ),
    Fault(
        "red-control",
        "the same with a textbook XREADGROUP/XAUTOCLAIM/XADD worker",
        "the stream checker fails it",
        kill_textbook_workers,
        short=Size(16, rounds=2, tokens=40),
        full=Size(500, rounds=20),
    ),
    Fault(
        "redis-kill",
        "SIGKILL of Redis under load, AOF everysec",
        "0 of the acknowledged lost",
        kill_redis,
        short=Size(300, rounds=2, slack=SLACK),
        full=Size(100_000, rounds=20),
        server=EVERY_SECOND,
    ),
    Fault(
        "lost-replies",
        "a proxy swallows the replies to enqueue, claim, emit, finish and renew",
        "0 lost, 0 wrong, 0 doubles",
        lose_replies,
        short=Size(40, rounds=5, slack=SLACK),
        full=Size(1_000, rounds=200),
    ),
    Fault(
        "worker-term",
        "SIGTERM of a worker with everything queued",
        "hand-over ≤ 2 s, 0 strikes, no claim after the signal",
        terminate_workers,
        short=Size(60, rounds=1, slack=SLACK),
        full=Size(10_000, rounds=20),
        tested_by="tests/chaos/test_worker_vanishes.py::test_sigterm_hands_over_at_once",
    ),
    Fault(
        "zombie",
        "SIGSTOP of a worker for 2 to 5 L, SIGCONT; a writer at an old epoch",
        "0 stale writes accepted, FENCED > 0",
        freeze_workers,
        short=Size(24, rounds=1, tokens=100, slack=SLACK),
        full=Size(2_000, rounds=20),
    ),
    Fault(
        "engine-hang",
        "SIGSTOP of an engine, its worker lives",
        "gap p99 ≤ hang limit + L",
        stop_engines,
        short=Size(24, rounds=1, tokens=100, slack=SLACK),
        full=Size(2_000, rounds=20),
        tested_by="tests/chaos/test_worker_engine_fails.py::test_a_hung_engine_is_killed_and_its_requests_go_on",
    ),
    Fault(
        "redis-restart",
        "SIGTERM or SIGKILL of Redis in mid-stream, AOF everysec",
        "0 granted again, pause ≤ downtime + 2 s",
        restart_redis,
        short=Size(30, rounds=2, slack=SLACK),
        full=Size(2_000, rounds=20),
        server=EVERY_SECOND,
    ),
    Fault(
        "redis-gone",
        "Redis is killed and comes back after 30 s",
        "0 lost, 0 wrong, recovery ≤ 5 s, memory bounded",
        stop_redis_for_long,
        short=Size(40, seconds=2.5, slack=SLACK),
        full=Size(500, seconds=30),
        tested_by="tests/chaos/test_worker_redis_fails.py::test_an_outage_longer_than_the_lease_is_a_pause",
        server=EVERY_SECOND,
    ),
    Fault(
        "data-wiped",
        "FLUSHALL under load",
        "new work done ≤ 5 s later, waiters told lost ≤ 10 s",
        wipe_redis,
        short=Size(8, slack=SLACK),
        full=Size(32),
        tested_by="tests/chaos/test_worker_redis_fails.py::test_a_wiped_redis_gets_its_functions_and_groups_back",
    ),
    Fault(
        "redis-full",
        "CONFIG SET maxmemory 1 for a while",
        "0 lost, 0 wrong, no worker exits, recovery ≤ 5 s",
        fill_redis,
        short=Size(40, rounds=1, seconds=1.0, slack=SLACK),
        full=Size(1_000, rounds=10, seconds=5),
        tested_by="tests/chaos/test_worker_redis_fails.py::test_a_redis_that_stalls_pauses_the_engine",
    ),
    Fault(
        "power-cut",
        "SIGKILL of Redis, AOF everysec, and its file cut to what it was a second before",
        "gone is what was acknowledged in that second and nothing else, who asked is told",
        cut_power,
        short=Size(72, rounds=1, tokens=20, slack=SLACK),
        full=Size(5_000, rounds=20),
        server=ONE_FILE,
    ),
    Fault(
        "disk-full",
        "a limit on the size of Redis' file for a while",
        "0 lost, 0 wrong, no worker exits, recovery ≤ 5 s",
        fill_disk,
        short=Size(30, rounds=1, seconds=0.5, slack=SLACK),
        full=Size(1_000, rounds=10, seconds=5),
        server=ONE_FILE,
    ),
    Fault(
        "failover",
        "SIGKILL of the master under three Sentinels, two replicas follow it",
        "gone is nothing that a producer saw replicated, who asked is told, the rest is exact",
        fail_over,
        short=Size(60, rounds=1, slack=SLACK),
        full=Size(2_000, rounds=10),
        tested_by="tests/integration/test_sentinel.py::test_streams_go_on_through_failovers",
    ),
    Fault(
        "partition-worker",
        "a silent line between worker and Redis",
        "noticed ≤ 6 s, 0 lost, 0 wrong",
        silence_worker,
        short=Size(30, rounds=1, seconds=1.0, slack=SLACK),
        full=Size(1_000, rounds=4, seconds=60),
        tested_by="tests/chaos/test_worker_redis_fails.py::test_a_silent_partition_is_noticed_and_streams_go_on_elsewhere",
    ),
    Fault(
        "partition-clients",
        "a silent line between readers and Redis",
        "tokens again ≤ 6 s after it, 0 gaps, 0 doubles",
        silence_clients,
        short=Size(30, rounds=1, seconds=1.0, slack=SLACK),
        full=Size(1_000, rounds=4, seconds=60),
    ),
    Fault(
        "resets",
        "TCP resets of all connections, again and again",
        "0 gaps, 0 doubles in 1,000 reconnects",
        reset_connections,
        short=Size(40, rounds=30, slack=SLACK),
        full=Size(1_000, rounds=1_000),
    ),
    Fault(
        "bad-lines",
        "slow, late, sliced and half-closed lines",
        "0 lost, 0 wrong, 0 doubles",
        trouble_line,
        short=Size(25, rounds=4, seconds=0.2, slack=SLACK),
        full=Size(2_000, rounds=80, seconds=1.0),
    ),
    Fault(
        "same-id",
        "the same ids from 16 producers at once, then with other payloads",
        "one run an id, the others are conflicts",
        enqueue_the_same,
        short=Size(20),
        full=Size(1_000),
    ),
    Fault(
        "producer-kill",
        "SIGKILL of a producer between two submits, and everything submitted again",
        "one run an id",
        kill_producers,
        short=Size(200, rounds=1, tokens=3),
        full=Size(1_000, rounds=10),
    ),
    Fault(
        "poison",
        "one among innocents that crashes, breaks or hangs its engine",
        "≤ 3 engines lost, dead letters hold it alone",
        poison,
        short=Size(15, rounds=1, tokens=20),
        full=Size(63, rounds=3),
        tested_by="tests/chaos/test_poison.py::test_poison_among_sixty_three_is_the_only_dead_letter",
    ),
    Fault(
        "sleeping-readers",
        "nobody reads while all is made",
        "every token is there afterwards, memory is that of the answers",
        sleep_while_reading,
        short=Size(40),
        full=Size(1_000, seconds=600),
    ),
    Fault(
        "few-blocks",
        "a pool of 20 KV blocks",
        "some are preempted, the same tokens",
        exhaust_blocks,
        short=Size(6),
        full=Size(1_000),
    ),
    Fault(
        "crowd",
        "10,000 requests of one tenant before the one of another",
        "its first token within one batch turn",
        crowd_out,
        short=Size(160, rounds=1, slack=SLACK),
        full=Size(10_000, rounds=20),
    ),
    Fault(
        "urgent",
        "a request of priority 0 while batch work of priority 9 fills all places",
        "its first token within 0.3 s, the batch resumes and is exact",
        displace,
        short=Size(8, rounds=2, tokens=400, slack=2 * SLACK),  # 2.4 s, and to wait takes 3
        full=Size(1_000, rounds=200, tokens=300),
    ),
    Fault(
        "soak",
        "workers killed and frozen, connections reset, replies lost, by draw",
        "0 lost, 0 wrong, resources at the baseline + 5 %",
        soak,
        short=Size(BATCH, seconds=1.0, slack=SLACK),
        full=Size(BATCH, seconds=3600),
    ),
    Fault(
        "real-streams",
        "SIGKILL of the worker while SmolLM2 streams",
        "every greedy answer is that of a calm run, no token twice",
        kill_real_workers,
        short=Size(8, rounds=1, tokens=24),
        full=Size(64, rounds=5, tokens=48),
        tested_by="tests/integration/test_main_job.py::"
        "test_two_hundred_streams_survive_the_kill_of_their_worker",
        lacks=lacks_model,
    ),
)


def find(name: str) -> Fault:
    """Return the fault of a name; raises KeyError for one that the table does not have."""
    return {fault.name: fault for fault in FAULTS}[name]
