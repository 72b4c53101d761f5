"""Workers and clients that call the queue at random, and what each answer must have been.

Hypothesis draws the actions. The model remembers every grant for ever, so stale workers go on
emitting, finishing and renewing what they lost long ago.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from redis import Redis

from headrace.functions import EmitOutcome, FinishOutcome, Grant, list_dead, replay_dead
from headrace.keys import Keys
from support.queue_driver import QueueDriver
from support.queue_invariants import check_empty, check_queue, stored_requests
from support.waiting import eventually

Action = tuple[str, dict[str, Any]]


def _action(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Action]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


_WORKERS = st.sampled_from(["w1", "w2"])
_TENANTS = st.sampled_from(["acme", "zeta"])
_REQUESTS = st.sampled_from("abcdefghijklmnop")
_PICK = st.integers(1, 6)  # one of the newest grants: older ones have mostly ended
_PRIORITIES = st.sampled_from([0, 1, 9])
_NEAR = st.sampled_from([0, 0, 0, -1, 1])  # how far a worker is off the end of the log

_ENQUEUE = _action(
    "enqueue",
    request=_REQUESTS,
    tenant=_TENANTS,
    priority=_PRIORITIES,
    cost=st.sampled_from([1, 1, 400, 5000]),
    deadline_ms=st.sampled_from([None] * 9 + [1]),
    ttl_ms=st.sampled_from([None] * 7 + [4, 40, 400]),
)
_CLAIM = _action(
    "claim",
    worker=_WORKERS,
    free_seqs=st.integers(1, 4),
    free_tokens=st.sampled_from([0, 500, 1000, 1000]),
)
_EMIT = _action(
    "emit",
    pick=_PICK,
    shift=_NEAR,
    num_tokens=st.integers(1, 3),
    is_stranger=st.sampled_from([False, False, False, True]),
)
_KINDS: dict[st.SearchStrategy[Action], int] = {  # how often each is drawn, of 21
    _ENQUEUE: 5,
    _CLAIM: 4,
    _EMIT: 4,
    _action("keep_or_return", pick=_PICK, what=st.sampled_from(["renew", "release", "strike"])): 1,
    _action("finish", pick=_PICK, shift=_NEAR): 1,
    _action("cancel", request=_REQUESTS, tenant=_TENANTS)
    | _action("cancel_granted", pick=_PICK)
    | _action("finish_now", pick=_PICK): 1,
    _action("reprioritise", request=_REQUESTS, tenant=_TENANTS, priority=_PRIORITIES)
    | _action("reprioritise_granted", pick=_PICK, priority=_PRIORITIES): 1,
    _action("claim_again"): 1,
    _action("lose_all_workers"): 2,
    _action("sweep", count=st.sampled_from([1, 100])) | _action("replay_the_dead"): 1,
}

ACTIONS = st.lists(
    # Not one_of: it gives every branch the same weight, however often it is named.
    st.sampled_from([kind for kind, often in _KINDS.items() for _ in range(often)]).flatmap(
        lambda kind: kind
    ),
    min_size=40,
    max_size=80,
)
"""Calls in the order in which they are made."""


class QueueModel:
    """A queue under random calls; every method checks the answer that it gets."""

    def __init__(self, client: Redis) -> None:
        self.client = client
        self.driver = QueueDriver(client, Keys("random"))
        self.granted: list[tuple[str, Grant]] = []  # (worker, grant), good or stale
        self.last_epoch: dict[tuple[str, str], int] = {}
        self.last_claim: tuple[str, str, tuple[Grant, ...]] | None = None
        self.num_claims = 0
        self.seen: set[str] = set()  # answers met, for a look at how much ground was covered

    def apply(self, action: Action) -> None:
        """Do one action, then hold the queue to its invariants."""
        name, arguments = action
        if self.granted or "pick" not in arguments:
            getattr(self, name)(**arguments)
        check_queue(self.client, self.driver.keys)

    def enqueue(self, request: str, tenant: str, **options: Any) -> None:
        """A client enqueues, sometimes what is there already."""
        self.driver.enqueue(request, tenant=tenant, **options)

    def claim(self, worker: str, free_seqs: int, free_tokens: int) -> None:
        """A worker claims with whatever room it has."""
        self.num_claims += 1
        nonce = f"nonce{self.num_claims}"
        room = {"free_seqs": free_seqs, "free_tokens": free_tokens}
        grants = self.driver.claim(worker, nonce=nonce, **room).grants
        assert len(grants) <= free_seqs
        for grant in grants:
            self._remember(worker, grant)
        if grants:
            self.last_claim = (worker, nonce, grants)

    def claim_again(self) -> None:
        """The reply was lost: the same nonce brings what was granted under it and is still held."""
        if self.last_claim is None:
            return
        worker, nonce, grants = self.last_claim
        held = [grant.held for grant in grants if self._holds(worker, grant)]
        again = self.driver.claim(worker, nonce=nonce).grants
        assert [grant.held for grant in again] == held

    def emit(self, pick: int, shift: int, num_tokens: int, is_stranger: bool) -> None:
        """A worker emits near the end of the log, maybe long after it lost the request."""
        worker, grant = self._pick(pick)
        worker = "stranger" if is_stranger else worker
        is_held = self._holds(worker, grant)
        before = self.driver.status(grant.request_id, grant.tenant)
        reply = self.driver.emit(grant, max(0, before.num_tokens + shift), num_tokens, worker)
        after = self.driver.status(grant.request_id, grant.tenant)
        has_grown = after.num_tokens > before.num_tokens
        assert has_grown == (is_held and before.num_tokens == max(0, before.num_tokens + shift))
        if has_grown:
            assert grant.epoch == self.last_epoch[grant.tenant, grant.request_id]
            assert reply.outcome in (EmitOutcome.OK, EmitOutcome.CANCEL, EmitOutcome.FINISH)
        assert reply.offset == after.num_tokens
        self.seen.add(f"emit {reply.outcome}")

    def finish(self, pick: int, shift: int) -> None:
        """A worker finishes with the right count or nearly so, and asks twice."""
        worker, grant = self._pick(pick)
        before = self.driver.status(grant.request_id, grant.tenant)
        is_held = self._holds(worker, grant)
        num_tokens = max(0, before.num_tokens + shift)
        reply = self.driver.finish(grant, num_tokens, worker)
        if not before.state.is_terminal:
            is_right = is_held and num_tokens == before.num_tokens
            assert (reply.outcome is FinishOutcome.OK) == is_right
        assert self.driver.finish(grant, num_tokens, worker) == reply
        self.seen.add(f"finish {reply.outcome}")

    def keep_or_return(self, pick: int, what: str) -> None:
        """A worker renews or hands back, maybe what is no longer its own."""
        worker, grant = self._pick(pick)
        is_held = self._holds(worker, grant)
        if what == "renew":
            assert self.driver.renew(grant, worker_id=worker) == (() if is_held else (grant.held,))
        else:
            released = self.driver.release(grant, worker_id=worker, strike=what == "strike")
            assert released == int(is_held)

    def cancel(self, request: str, tenant: str) -> None:
        """A client cancels, maybe what nobody knows."""
        self.driver.cancel(request, tenant)

    def cancel_granted(self, pick: int) -> None:
        """A client cancels what runs, or has run."""
        _, grant = self._pick(pick)
        self.driver.cancel(grant.request_id, grant.tenant)

    def finish_now(self, pick: int) -> None:
        """A client wants what there is of what runs, or has run."""
        _, grant = self._pick(pick)
        self.driver.finish_now(grant.request_id, grant.tenant)

    def reprioritise(self, request: str, tenant: str, priority: int) -> None:
        """A client wants a request sooner or later, maybe one that nobody knows."""
        state = self.driver.reprioritise(priority, request, tenant)
        if state is not None and not state.is_terminal:
            assert self.driver.status(request, tenant).priority == priority

    def reprioritise_granted(self, pick: int, priority: int) -> None:
        """What runs changes its lane, and its holder stays."""
        _, grant = self._pick(pick)
        before = self.driver.status(grant.request_id, grant.tenant)
        self.reprioritise(grant.request_id, grant.tenant, priority)
        after = self.driver.status(grant.request_id, grant.tenant)
        assert (after.owner, after.epoch) == (before.owner, before.epoch)

    def lose_all_workers(self) -> None:
        """Every holder vanishes at once; a dead letter was alone with its last one."""
        holders = [owner for owner in map(self._owner, self.last_epoch) if owner is not None]
        dead = self.driver.let_leases_lapse().dead_lettered
        for ref in dead:
            self.seen.add("dead letter")
            letters = self.driver.run(list_dead(self.driver.keys))
            name = (ref.tenant, ref.request_id)
            (*_, letter) = [one for one in letters if (one.tenant, one.request_id) == name]
            assert letter.evidence[-1].was_alone
        assert len(dead) <= len(set(holders))

    def sweep(self, count: int) -> None:
        """A sweep and a cleaning go by while leases are good, and find nothing to do."""
        found = self.driver.reap(count=count)
        assert not found.requeued + found.dead_lettered
        assert self.driver.janitor(count) == 0

    def replay_the_dead(self) -> None:
        """An operator plays dead letters again: their ids begin anew, and their past is void."""
        for letter in self.driver.run(list_dead(self.driver.keys)):
            self.driver.run(replay_dead(self.driver.keys, entry_id=letter.entry_id))
            name = (letter.tenant, letter.request_id)
            self.granted = [
                (worker, grant)
                for worker, grant in self.granted
                if (grant.tenant, grant.request_id) != name
            ]
            self.last_epoch.pop(name, None)
            self.last_claim = None

    def drain(self) -> None:
        """A healthy worker ends all that is left; nothing but results remains."""
        self.driver.let_leases_lapse()

        def serve() -> bool:
            for grant in self.driver.claim("healthy").grants:
                self.driver.finish(grant, grant.num_tokens, "healthy")
            return self.driver.depth().queued == 0

        eventually(serve)
        check_queue(self.client, self.driver.keys)
        check_empty(self.client, self.driver.keys)
        for request in stored_requests(self.client, self.driver.keys):
            key = self.driver.keys.request(request.tenant, request.request_id)
            assert self.client.pttl(key) > 0

    def _pick(self, pick: int) -> tuple[str, Grant]:
        return self.granted[-min(pick, len(self.granted))]

    def _owner(self, name: tuple[str, str]) -> str | None:
        tenant, request_id = name
        return self.driver.status(request_id, tenant).owner

    def _holds(self, worker: str, grant: Grant) -> bool:
        status = self.driver.status(grant.request_id, grant.tenant)
        return (status.owner, status.epoch) == (worker, grant.epoch)

    def _remember(self, worker: str, grant: Grant) -> None:
        name = (grant.tenant, grant.request_id)
        assert grant.epoch > self.last_epoch.get(name, 0), "an epoch was granted twice"
        self.last_epoch[name] = grant.epoch
        self.granted.append((worker, grant))
