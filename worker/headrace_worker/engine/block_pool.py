"""The block pool: who owns which KV block, and which freed blocks still hold a useful prefix.

Paged KV memory as in vLLM (PagedAttention, Kwon et al., SOSP 2023). A block is in exactly one of
three places, and ``check_integrity`` proves it::

    free        content is garbage, handed out first
    cached      nobody refers to it, its prefix is remembered; the least recently used is evicted
    referenced  one or more sequences have it in their block table

Block 0 is the trash block for padding rows: it belongs to nobody and is never handed out.
Owned by the scheduler and touched by the engine's thread only.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import chain

TRASH_BLOCK = 0


def root_digest(salt: bytes) -> bytes:
    """Return where a tenant's hash chain starts: equal prompts under two salts never meet."""
    return blake2b(salt, digest_size=32, person=b"headrace.salt").digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block: everything before it (``parent``) and its own token ids.

    Parent and ids have fixed widths, so no two inputs share an encoding; ``person`` keeps it apart
    from salts.
    """
    return blake2b(
        parent + array("Q", token_ids).tobytes(), digest_size=32, person=b"headrace.block"
    ).digest()


class BlockPoolCorrupted(RuntimeError):
    """The books of the block pool contradict each other: a fault of ours."""


class BlockPool:
    """Hand out blocks 1 … num_blocks, count references, remember prefixes."""

    def __init__(
        self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True
    ) -> None:
        self.num_blocks = num_blocks  # usable ones, the trash block not counted
        self.block_size = block_size  # tokens
        self.enable_prefix_caching = enable_prefix_caching
        self._free = list(range(num_blocks, 0, -1))  # a stack: reuse what is warm
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced; first is evicted first
        self._ref_counts = [0] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}  # digest -> the block that holds it
        self._digest_of: dict[int, bytes] = {}  # the inverse

    @property
    def num_free(self) -> int:
        """Blocks that ``allocate`` can hand out: free and evictable ones."""
        return len(self._free) + len(self._cached)

    @property
    def capacity_tokens(self) -> int:
        """Tokens that the pool can hold in all."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks that many tokens take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int] | None:
        """Take ``count`` blocks with one reference each, or None when there are not enough."""
        if count > self.num_free:
            return None
        blocks = [self._take_free() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def find_prefix(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest remembered prefix, without taking a reference."""
        found = []
        for digest in digests:
            block = self._block_of.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def count_unreferenced(self, blocks: Iterable[int]) -> int:
        """Return how many of these would leave ``num_free`` if they were acquired."""
        return sum(1 for block in blocks if self._ref_counts[block] == 0)

    def count_held_only_by(self, tables: Iterable[Iterable[int]]) -> int:
        """Return how many blocks nobody would hold any more if these block tables were released."""
        held = Counter(chain.from_iterable(tables))
        return sum(1 for block, count in held.items() if self._ref_counts[block] == count)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that ``find_prefix`` returned."""
        for block in blocks:
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def register(self, block: int, digest: bytes) -> None:
        """Remember what a full, computed, held block contains; the first to come keeps the name."""
        if self.enable_prefix_caching and digest not in self._block_of:
            self._block_of[digest] = block
            self._digest_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block; the end of a prefix is evicted before its beginning."""
        for block in reversed(blocks):
            if self._ref_counts[block] <= 0:
                raise BlockPoolCorrupted(f"block {block} is released but nobody holds it")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._retire(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Strike held blocks from the prefix cache, because what was computed into them is bad."""
        for block in blocks:
            self._forget_digest(block)

    def check_integrity(self) -> None:
        """Raise BlockPoolCorrupted unless free + cached + referenced = all, once each."""
        referenced = {block for block, count in enumerate(self._ref_counts) if count > 0}
        places = [*self._free, *self._cached, *referenced]
        if sorted(places) != list(range(1, self.num_blocks + 1)):
            raise BlockPoolCorrupted(
                f"{len(self._free)} free, {len(self._cached)} cached and {len(referenced)}"
                f" referenced blocks are not the {self.num_blocks} that there are"
            )
        if any(self._block_of.get(digest) != block for block, digest in self._digest_of.items()):
            raise BlockPoolCorrupted("a digest and its block disagree")
        if len(self._block_of) != len(self._digest_of) or not self._cached.keys() <= set(
            self._digest_of
        ):
            raise BlockPoolCorrupted("a cached block has no digest, or a digest no block")

    def _take_free(self) -> int:
        if self._free:
            return self._free.pop()
        block, _ = self._cached.popitem(last=False)
        self._forget_digest(block)
        return block

    def _retire(self, block: int) -> None:
        if block in self._digest_of:
            self._cached[block] = None
        else:
            self._free.append(block)

    def _forget_digest(self, block: int) -> None:
        digest = self._digest_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
