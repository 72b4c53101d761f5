"""Random calls by several workers, stale and repeated ones included, keep the queue true."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis import Redis

from headrace import functions
from headrace.functions import EmitOutcome, FinishOutcome, Grant
from headrace.keys import Keys
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty, check_queue, stored_requests
from support.servers import Server
from support.waiting import eventually

WORKERS = st.sampled_from(["w1", "w2", "w3"])
TENANTS = st.sampled_from(["acme", "zeta"])
REQUESTS = st.sampled_from(["a", "b", "c", "d"])
PICK = st.integers(0, 1000)


class QueueMachine(RuleBasedStateMachine):
    """Workers and clients act at random; what they hold or once held is remembered for ever."""

    def __init__(self, client: Redis) -> None:
        super().__init__()
        client.flushall()
        self.client = client
        self.driver = QueueDriver(client, Keys("random"))
        self.granted: list[tuple[str, Grant]] = []  # (worker, grant), good or stale
        self.last_epoch: dict[tuple[str, str], int] = {}
        self.last_claim: tuple[str, str, dict[str, int]] | None = None

    @rule(
        request=REQUESTS,
        tenant=TENANTS,
        priority=st.sampled_from([0, 1, 9]),
        cost=st.sampled_from([1, 400, 5000]),
        deadline_ms=st.sampled_from([None, None, None, 1]),
    )
    def enqueue(
        self, request: str, tenant: str, priority: int, cost: int, deadline_ms: int | None
    ) -> None:
        """A client enqueues, often what is there already."""
        self.driver.enqueue(
            request, tenant=tenant, priority=priority, cost=cost, deadline_ms=deadline_ms
        )

    @rule(worker=WORKERS, free_seqs=st.integers(1, 4), free_tokens=st.sampled_from([0, 500, 1000]))
    def claim(self, worker: str, free_seqs: int, free_tokens: int) -> None:
        """A worker claims with whatever room it has."""
        room = {"free_seqs": free_seqs, "free_tokens": free_tokens}
        nonce = f"nonce{len(self.granted)}-{worker}-{free_seqs}-{free_tokens}"
        reply = self.driver.claim(worker, nonce=nonce, **room)
        assert len(reply.grants) <= free_seqs
        for grant in reply.grants:
            self._remember(worker, grant)
        if reply.grants:
            self.last_claim = (worker, nonce, room)

    @rule()
    def claim_again(self) -> None:
        """The reply was lost: the same nonce brings nothing that was not granted under it."""
        if self.last_claim is None:
            return
        worker, nonce, room = self.last_claim
        known = {(owner, grant.held) for owner, grant in self.granted}
        for grant in self.driver.claim(worker, nonce=nonce, **room).grants:
            if (worker, grant.held) not in known:  # the worker has claimed otherwise since
                self._remember(worker, grant)

    @rule(pick=PICK, shift=st.sampled_from([0, 0, 0, -1, 1]), num_tokens=st.integers(1, 3))
    def emit(self, pick: int, shift: int, num_tokens: int) -> None:
        """A worker emits at the right offset or near it, maybe long after it lost the request."""
        if not self.granted:
            return
        worker, grant = self.granted[pick % len(self.granted)]
        before = self.driver.status(grant.request_id, grant.tenant)
        offset = max(0, before.num_tokens + shift)
        reply = self.driver.emit(grant, offset, num_tokens, worker)
        after = self.driver.status(grant.request_id, grant.tenant)
        if after.num_tokens > before.num_tokens:
            assert before.owner == worker
            assert grant.epoch == self.last_epoch[grant.tenant, grant.request_id]
            assert reply.outcome in (EmitOutcome.OK, EmitOutcome.CANCEL)
        assert reply.offset == after.num_tokens

    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        """A worker finishes, and asks twice."""
        if not self.granted:
            return
        worker, grant = self.granted[pick % len(self.granted)]
        before = self.driver.status(grant.request_id, grant.tenant)
        reply = self.driver.finish(grant, before.num_tokens, worker)
        if reply.outcome is FinishOutcome.OK and not before.state.is_terminal:
            assert (before.owner, before.epoch) == (worker, grant.epoch)
        assert self.driver.finish(grant, before.num_tokens, worker) == reply

    @rule(pick=PICK, what=st.sampled_from(["renew", "release", "strike"]))
    def keep_or_return(self, pick: int, what: str) -> None:
        """A worker renews or hands back, maybe what is no longer its own."""
        if not self.granted:
            return
        worker, grant = self.granted[pick % len(self.granted)]
        before = self.driver.status(grant.request_id, grant.tenant)
        is_held = (before.owner, before.epoch) == (worker, grant.epoch)
        if what == "renew":
            assert self.driver.renew(grant, worker_id=worker) == (() if is_held else (grant.held,))
        else:
            released = self.driver.release(grant, worker_id=worker, strike=what == "strike")
            assert released == int(is_held)

    @rule(request=REQUESTS, tenant=TENANTS)
    def cancel(self, request: str, tenant: str) -> None:
        """A client cancels."""
        self.driver.cancel(request, tenant)

    @rule()
    def lose_all_workers(self) -> None:
        """Every holder vanishes at once."""
        self.driver.let_leases_lapse()

    @rule(count=st.sampled_from([1, 100]))
    def sweep(self, count: int) -> None:
        """A sweep and a cleaning go by while leases are good."""
        self.driver.reap(count=count)
        assert self.driver.janitor(count) == 0

    @rule()
    def replay_the_dead(self) -> None:
        """An operator plays dead letters again."""
        for letter in self.driver.run(functions.list_dead(self.driver.keys)):
            self.driver.run(functions.replay_dead(self.driver.keys, entry_id=letter.entry_id))
            key = (letter.tenant, letter.request_id)
            self.granted = [
                item for item in self.granted if (item[1].tenant, item[1].request_id) != key
            ]
            self.last_epoch.pop(key, None)
            self.last_claim = None

    @invariant()
    def agrees(self) -> None:
        """Counts, lanes, hashes and token logs tell the same."""
        check_queue(self.client, self.driver.keys)

    def teardown(self) -> None:
        """A healthy worker comes and drains the queue: nothing but results is left."""
        self.driver.let_leases_lapse()

        def drain() -> bool:
            for grant in self.driver.claim("healthy").grants:
                self.driver.finish(grant, grant.num_tokens, "healthy")
            return self.driver.depth().queued == 0

        eventually(drain)
        check_queue(self.client, self.driver.keys)
        check_empty(self.client, self.driver.keys)
        for request in stored_requests(self.client, self.driver.keys):
            assert (
                self.client.pttl(self.driver.keys.request(request.tenant, request.request_id)) > 0
            )
        self.client.flushall()

    def _remember(self, worker: str, grant: Grant) -> None:
        key = (grant.tenant, grant.request_id)
        assert grant.epoch > self.last_epoch.get(key, 0), "an epoch was granted twice"
        self.last_epoch[key] = grant.epoch
        self.granted.append((worker, grant))


def test_any_sequence_of_calls_keeps_the_queue_true(server: Server) -> None:
    """Exactly one end each, at most one accepted writer, dense offsets, true counts, no leaks."""
    with server.connect() as client:
        machine: Callable[[], RuleBasedStateMachine] = lambda: QueueMachine(client)  # noqa: E731
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=40,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
