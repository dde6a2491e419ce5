"""KV blocks: who holds them, which of them hold a known prefix, and which to give away next."""

from collections import OrderedDict
from collections.abc import Sequence as Items
from dataclasses import dataclass

# What a block's tokens and everything before them are known as. A key holds the tokens themselves and the number of
# its parent's key, so two different prefixes can never be taken for one another, as they could with hashes.
PrefixKey = tuple[int, tuple[int, ...]]
ROOT = 0


@dataclass(slots=True)
class Block:
    references: int = 0
    key: PrefixKey | None = None  # set while the block can serve as a cached prefix


class NoFreeBlocks(Exception):
    """More blocks were asked for than are free."""


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each.

    A block is held by as many sequences as its reference count says, or free. A free block may still hold a known
    prefix: `match` revives it. Free blocks are given away least recently used first, those without a prefix before
    all others.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._blocks = [Block() for _ in range(num_blocks)]
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._cached: dict[PrefixKey, int] = {}  # key -> block
        self._numbers: dict[PrefixKey, int] = {}  # key -> its number, by which its children name it
        self._next_number = ROOT + 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def is_free(self, block: int) -> bool:
        return block in self._free

    def allocate(self, count: int) -> list[int]:
        """Hold `count` blocks. Raises NoFreeBlocks, and holds none, when fewer are free."""
        if count > len(self._free):
            raise NoFreeBlocks(f"{count} KV blocks wanted, {len(self._free)} free")
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._blocks[block].references = 1
            taken.append(block)
        return taken

    def hold(self, blocks: Items[int]) -> None:
        """Hold blocks that `match` found, too."""
        for block in blocks:
            self._free.pop(block, None)
            self._blocks[block].references += 1

    def release(self, blocks: Items[int]) -> None:
        """Give a sequence's blocks back. Its tail is forgotten first: a prefix's head serves more requests."""
        for block in reversed(blocks):
            state = self._blocks[block]
            if state.references == 0:
                raise ValueError(f"KV block {block} is released, but nobody holds it")
            state.references -= 1
            if state.references == 0:
                self._free[block] = None
                if state.key is None:
                    self._free.move_to_end(block, last=False)

    def match(self, tokens: Items[int]) -> list[int]:
        """The longest cached prefix of `tokens`, as blocks; never all of `tokens`, since one must be computed."""
        found: list[int] = []
        parent = ROOT
        for start in range(0, len(tokens) - self.block_size, self.block_size):
            key = (parent, tuple(tokens[start : start + self.block_size]))
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
            parent = self._numbers[key]
        return found

    def register(self, block: int, parent: int, tokens: Items[int]) -> int:
        """Note that `block` holds the K and V of `tokens`, after the prefix numbered `parent`. Returns its number."""
        key = (parent, tuple(tokens))
        if key not in self._cached:
            self._cached[key] = block
            self._numbers[key] = self._next_number
            self._next_number += 1
            self._blocks[block].key = key
        return self._numbers[key]

    def number_of(self, block: int) -> int:
        """The number of the prefix that a matched block ends."""
        key = self._blocks[block].key
        if key is None:
            raise ValueError(f"KV block {block} holds no cached prefix")
        return self._numbers[key]

    def forget(self, blocks: Items[int]) -> None:
        """Let `match` find these no more, whoever holds them."""
        for block in blocks:
            self._forget(block)

    def _forget(self, block: int) -> None:
        key = self._blocks[block].key
        if key is not None:
            del self._cached[key], self._numbers[key]
            self._blocks[block].key = None

    def check_integrity(self) -> None:
        """Raises RuntimeError unless every block is either free or held, and the cache names just what it holds."""
        for index, block in enumerate(self._blocks):
            if block.references < 0 or (block.references == 0) != (index in self._free):
                free = index in self._free
                raise RuntimeError(f"KV block {index}: {block.references} references, free: {free}")
            if block.key is not None and self._cached.get(block.key) != index:
                raise RuntimeError(f"KV block {index} holds a prefix that the cache does not know")
        keyed = sum(block.key is not None for block in self._blocks)
        if not (len(self._cached) == len(self._numbers) == keyed):
            raise RuntimeError(f"{len(self._cached)} cached prefixes, {keyed} blocks that hold one")
