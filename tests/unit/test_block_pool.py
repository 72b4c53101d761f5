"""The block pool accounts for every block, and shares prefixes without mixing anything up."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace_worker.engine.block_pool import (
    TRASH_BLOCK,
    BlockPool,
    BlockPoolCorrupted,
    block_digest,
    root_digest,
)


def chain(*blocks: list[int], salt: bytes = b"") -> list[bytes]:
    """Return the digests of these full blocks."""
    digests = [root_digest(salt)]
    for token_ids in blocks:
        digests.append(block_digest(digests[-1], token_ids))
    return digests[1:]


def take(pool: BlockPool, count: int) -> list[int]:
    """Allocate blocks that must be there."""
    blocks = pool.allocate(count)
    assert blocks is not None
    return blocks


def test_the_trash_block_is_never_handed_out() -> None:
    """All usable blocks can be allocated, and block 0 is not among them."""
    pool = BlockPool(5, 4)
    blocks = take(pool, 5)
    assert sorted(blocks) == [1, 2, 3, 4, 5]
    assert TRASH_BLOCK not in blocks


def test_no_free_block_is_an_answer_and_takes_nothing() -> None:
    """A question that cannot be met returns None and leaves the pool as it was."""
    pool = BlockPool(3, 4)
    take(pool, 2)
    assert pool.allocate(2) is None
    assert pool.num_free == 1
    pool.check_integrity()


def test_blocks_for_rounds_up() -> None:
    """A block that is begun is needed whole."""
    pool = BlockPool(3, 4)
    assert [pool.blocks_for(count) for count in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_a_released_prefix_is_found_again() -> None:
    """Blocks nobody holds keep their content until they are needed."""
    pool = BlockPool(4, 2)
    blocks, digests = take(pool, 2), chain([1, 2], [3, 4])
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    assert pool.num_free == 4
    assert pool.find_prefix(digests) == blocks


def test_a_prefix_ends_at_the_first_unknown_block() -> None:
    """A known block behind an unknown one is of no use."""
    pool = BlockPool(4, 2)
    digests = chain([1, 2], [3, 4], [5, 6])
    first, third = take(pool, 2)
    pool.register(first, digests[0])
    pool.register(third, digests[2])
    assert pool.find_prefix(digests) == [first]


def test_a_shared_block_is_free_only_after_its_last_holder() -> None:
    """References are counted."""
    pool = BlockPool(2, 2)
    blocks = take(pool, 1)
    pool.register(blocks[0], chain([1, 2])[0])
    pool.acquire(blocks)
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    """Under pressure a long prefix shrinks from behind, so what is left stays usable."""
    pool = BlockPool(3, 2)
    blocks, digests = take(pool, 3), chain([1, 2], [3, 4], [5, 6])
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    take(pool, 1)
    assert pool.find_prefix(digests) == blocks[:2]


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    """Using a cached block again makes it the last to go."""
    pool = BlockPool(2, 1)
    old, new = take(pool, 2)
    digests = [chain([1])[0], chain([2])[0]]
    pool.register(old, digests[0])
    pool.register(new, digests[1])
    pool.release([old])
    pool.release([new])
    pool.acquire([old])
    pool.release([old])
    take(pool, 1)
    assert pool.find_prefix(digests[:1]) == [old]
    assert pool.find_prefix(digests[1:]) == []


def test_garbage_is_handed_out_before_a_prefix_is_evicted() -> None:
    """Free blocks without content go first."""
    pool = BlockPool(3, 1)
    cached, *_ = take(pool, 1)
    pool.register(cached, chain([1])[0])
    pool.release([cached])
    assert cached not in take(pool, 2)


def test_a_second_block_with_the_same_content_stays_nameless() -> None:
    """When two sequences compute the same block at once, only the first is remembered."""
    pool = BlockPool(2, 1)
    first, second = take(pool, 2)
    digest = chain([1])[0]
    pool.register(first, digest)
    pool.register(second, digest)
    pool.release([second, first])
    assert pool.find_prefix([digest]) == [first]
    pool.check_integrity()


def test_a_forgotten_block_is_no_longer_a_prefix() -> None:
    """Bad content does not outlive its sequence."""
    pool = BlockPool(2, 1)
    blocks, digest = take(pool, 1), chain([1])[0]
    pool.register(blocks[0], digest)
    pool.forget(blocks)
    pool.release(blocks)
    assert pool.find_prefix([digest]) == []
    pool.check_integrity()


def test_releasing_twice_is_a_fault_of_ours() -> None:
    """A double free is loud."""
    pool = BlockPool(2, 1)
    blocks = take(pool, 1)
    pool.release(blocks)
    with pytest.raises(BlockPoolCorrupted, match="nobody holds it"):
        pool.release(blocks)


def test_integrity_notices_a_lost_block() -> None:
    """The check is able to fail."""
    pool = BlockPool(2, 1)
    pool._free.pop()
    with pytest.raises(BlockPoolCorrupted, match="not the 2 that there are"):
        pool.check_integrity()


def test_integrity_notices_a_block_in_two_places() -> None:
    """A block that is free and held at once is found."""
    pool = BlockPool(2, 1)
    pool._free.append(take(pool, 1)[0])
    with pytest.raises(BlockPoolCorrupted):
        pool.check_integrity()


def test_tenants_do_not_share_a_prefix() -> None:
    """The same tokens under another salt have other digests (B33)."""
    assert chain([1, 2], salt=b"a") != chain([1, 2], salt=b"b")
    assert chain([1, 2], salt=b"a") == chain([1, 2], salt=b"a")


def test_a_salt_cannot_imitate_a_block() -> None:
    """Salt and block are hashed in different domains, so they never meet (B33)."""
    token_ids = [7, 8]
    parent = root_digest(b"")
    imitation = parent + b"".join(token.to_bytes(8, "little") for token in token_ids)
    assert root_digest(imitation) != block_digest(parent, token_ids)


def test_the_split_into_blocks_is_part_of_the_key() -> None:
    """The same tokens cut elsewhere are another chain."""
    assert chain([1, 2, 3, 4])[-1] != chain([1, 2], [3, 4])[-1]


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations, against a model that only counts references."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, 1)
        self.tables: list[list[int]] = []
        self.digests = chain(*([i] for i in range(7)))

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        held = {block for table in self.tables for block in table}
        assert (blocks is None) == (count > 7 - len(held))
        if blocks is not None:
            assert not held & set(blocks)
            self.tables.append(blocks)

    @rule(data=st.data())
    def register(self, data: st.DataObject) -> None:
        if held := [block for table in self.tables for block in table]:
            digest = data.draw(st.sampled_from(self.digests))
            block = data.draw(st.sampled_from(held))
            if block not in self.pool._digest_of:
                self.pool.register(block, digest)

    @rule(length=st.integers(0, 7))
    def share_prefix(self, length: int) -> None:
        found = self.pool.find_prefix(self.digests[:length])
        free_before = self.pool.num_free
        taken = self.pool.count_unreferenced(found)
        self.pool.acquire(found)
        assert self.pool.num_free == free_before - taken
        self.tables.append(found)

    @rule(data=st.data(), is_poisoned=st.booleans())
    def release(self, data: st.DataObject, is_poisoned: bool) -> None:
        if self.tables:
            table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
            if is_poisoned:
                self.pool.forget(table)
            self.pool.release(table)

    @invariant()
    def books_agree(self) -> None:
        """Free + cached + referenced = all, and the references are those of the tables (B53)."""
        self.pool.check_integrity()
        counts = Counter(block for table in self.tables for block in table)
        assert self.pool.num_free == 7 - len(counts)
        assert {b: c for b, c in enumerate(self.pool._ref_counts) if c} == counts


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_a_block_is_freed_only_when_all_of_its_holders_leave() -> None:
    """Shared blocks count where every holder is among those that would be released."""
    pool = BlockPool(8, 4)
    first = pool.allocate(3)
    assert first is not None
    pool.acquire(first[:2])
    second = [*first[:2], *(pool.allocate(1) or [])]
    assert pool.count_held_only_by([first]) == 1
    assert pool.count_held_only_by([second]) == 1
    assert pool.count_held_only_by([first, second]) == 4
    assert pool.count_held_only_by([]) == 0
