"""claim: lanes share by weight and age, tenants share by what they were served."""

from __future__ import annotations

from collections import Counter

from headrace.functions import Grant
from support.queue_driver import QueueDriver

AGEING_MS = 10_000


def _serve(driver: QueueDriver, number: int, num_tokens: int = 1) -> list[Grant]:
    """Run requests one by one to their end; returns their grants in the order of service."""
    grants = []
    for _ in range(number):
        grant = driver.grant()
        driver.emit(grant, 0, num_tokens)
        driver.finish(grant, num_tokens)
        grants.append(grant)
    return grants


def _fill(driver: QueueDriver, number: int, tenant: str, priority: int = 5) -> None:
    for index in range(number):
        driver.enqueue(f"{tenant}-{priority}-{index}", tenant=tenant, priority=priority)


def test_a_tenant_is_served_first_in_first_out(driver: QueueDriver) -> None:
    """Within a lane and a tenant, order is that of arrival."""
    _fill(driver, 20, "acme")
    served = [grant.request_id for grant in _serve(driver, 20)]
    assert served == [f"acme-5-{index}" for index in range(20)]


def test_a_lane_gets_twice_the_share_of_the_one_behind_it(driver: QueueDriver) -> None:
    """Neighbouring lanes with work share two to one; neither waits for the other to be empty."""
    _fill(driver, 40, "acme", priority=0)
    _fill(driver, 40, "acme", priority=1)
    lanes = Counter(grant.priority for grant in _serve(driver, 30))
    assert lanes == {0: 20, 1: 10}


def test_a_request_that_asks_for_everything_does_not_shut_out_its_lane(
    driver: QueueDriver,
) -> None:
    """After max_tokens of two thousand million, urgent requests still go before bulk work."""
    driver.enqueue("greedy", priority=0, cost=2**31)
    driver.finish(driver.grant())
    for number in range(5):
        driver.enqueue(f"bulk{number}", priority=9, cost=300)
        driver.enqueue(f"urgent{number}", priority=0, cost=300)
    served = [grant.request_id for grant in _serve(driver, 6)]
    assert len([name for name in served if name.startswith("urgent")]) == 5


def test_an_urgent_request_passes_a_backlog_of_bulk_work(driver: QueueDriver) -> None:
    """Lane 0 goes next although lane 9 has waited longer and holds more."""
    _fill(driver, 30, "acme", priority=9)
    _serve(driver, 5)
    driver.enqueue("urgent", priority=0)
    assert driver.grant().request_id == "urgent"


def test_a_lane_that_comes_back_does_not_bring_saved_turns(driver: QueueDriver) -> None:
    """After a long pause a lane shares from now on, instead of catching up."""
    _fill(driver, 40, "acme", priority=1)
    _serve(driver, 20)
    _fill(driver, 40, "acme", priority=0)
    lanes = Counter(grant.priority for grant in _serve(driver, 15))
    assert lanes == {0: 10, 1: 5}


def test_bulk_work_that_waited_long_goes_next(driver: QueueDriver) -> None:
    """A lane that was passed over for ten seconds has a turn, whatever its weight."""
    _fill(driver, 10, "acme", priority=0)
    driver.enqueue("bulk", priority=9)
    _serve(driver, 3)
    since = driver.client.hget(driver.keys.stats, "since:9")
    assert since is not None
    driver.client.hset(driver.keys.stats, "since:9", int(since) - AGEING_MS)
    assert driver.grant().request_id == "bulk"


def test_one_tenant_cannot_starve_another(driver: QueueDriver) -> None:
    """Behind a thousand requests of one tenant, the one request of another is served next."""
    _fill(driver, 1000, "flood")
    _serve(driver, 10)
    driver.enqueue("single", tenant="quiet")
    served = [grant.request_id for grant in _serve(driver, 2)]
    assert "single" in served


def test_tenants_share_tokens_not_requests(driver: QueueDriver) -> None:
    """A tenant whose answers are long gets fewer turns."""
    _fill(driver, 100, "long")
    _fill(driver, 100, "short")
    turns: Counter[str] = Counter()
    for _ in range(60):
        grant = driver.grant()
        num_tokens = 40 if grant.tenant == "long" else 10
        driver.emit(grant, 0, num_tokens)
        driver.finish(grant, num_tokens)
        turns[grant.tenant] += 1
    assert 2.5 < turns["short"] / turns["long"] < 4.5


def test_one_claim_alternates_between_tenants(driver: QueueDriver) -> None:
    """The prompt is charged at the grant, so a burst does not all go to the first tenant."""
    _fill(driver, 10, "acme")
    _fill(driver, 10, "zeta")
    tenants = Counter(grant.tenant for grant in driver.claim(free_seqs=8).grants)
    assert tenants == {"acme": 4, "zeta": 4}


def test_a_newcomer_starts_where_the_others_are(driver: QueueDriver) -> None:
    """A tenant that arrives late is not served alone until it has caught up."""
    _fill(driver, 100, "old")
    _serve(driver, 30)
    _fill(driver, 100, "new")
    tenants = Counter(grant.tenant for grant in _serve(driver, 20))
    assert abs(tenants["new"] - tenants["old"]) <= 2


def test_a_takeover_is_not_charged_for_its_prompt_again(driver: QueueDriver) -> None:
    """Whoever lost a worker pays once."""
    driver.enqueue("r1", payload=b"x" * 400)
    grant = driver.grant()
    before = driver.client.zscore(driver.keys.served(5), "acme")
    driver.release(grant)
    driver.grant()
    assert driver.client.zscore(driver.keys.served(5), "acme") == before == 100


def test_thousands_of_busy_tenants_do_not_make_a_claim_slow(driver: QueueDriver) -> None:
    """Tenants that only run are passed over once a claim, not once a grant."""
    room = {"free_seqs": 64, "free_tokens": 10**6, "total_tokens": 10**6}
    for number in range(2048):
        driver.enqueue(f"r{number}", tenant=f"busy{number}", cost=1)
    while driver.claim(**room).grants:
        pass
    for number in range(64):
        driver.enqueue(f"r{number}", tenant=f"late{number}", cost=1)
    late = {f"late{number}": 10**6 for number in range(64)}
    driver.client.zadd(driver.keys.served(5), late)  # served more than all the others
    driver.client.config_resetstat()
    assert len(driver.claim(**room).grants) == 64
    looks = driver.client.info("commandstats")["cmdstat_hexists"]["calls"]
    assert looks < 3 * (2048 + 64)
