"""Who holds which KV block, what is remembered, and what is given away first."""

import random

import pytest
from engine.block_pool import ROOT, BlockPool, NoFreeBlocks


def remember(pool: BlockPool, tokens: list[int]) -> list[int]:
    """Hold blocks for a text, known to the cache as far as they are full."""
    blocks = pool.allocate(pool.blocks_for(len(tokens)))
    number = ROOT
    for index in range(len(tokens) // pool.block_size):
        start = index * pool.block_size
        number = pool.register(blocks[index], number, tokens[start : start + pool.block_size])
    return blocks


def test_blocks_are_held_and_free_again() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    assert len(set(blocks)) == 3
    assert (pool.num_free, pool.num_used) == (1, 3)
    pool.release(blocks)
    assert (pool.num_free, pool.num_used) == (4, 0)


def test_asking_for_too_many_holds_none() -> None:
    pool = BlockPool(4, 16)
    held = pool.allocate(3)
    with pytest.raises(NoFreeBlocks, match="2 KV blocks wanted, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.release(held)
    pool.check_integrity()


def test_releasing_what_nobody_holds_raises() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(2)
    pool.release(blocks)
    with pytest.raises(ValueError, match=f"KV block {blocks[1]} is released, but nobody holds it"):
        pool.release(blocks)
    with pytest.raises(ValueError, match="nobody holds it"):
        BlockPool(4, 16).release([0])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (3, 1), (4, 2), (6, 2), (7, 3)])
def test_so_many_tokens_need_so_many_blocks(tokens: int, blocks: int) -> None:
    assert BlockPool(4, 3).blocks_for(tokens) == blocks


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(4, 2)
    blocks = remember(pool, [1, 2])
    pool.hold(blocks)
    pool.release(blocks)
    assert not pool.is_free(blocks[0])
    pool.release(blocks)
    assert pool.is_free(blocks[0])


def test_the_longest_known_prefix_is_found_and_never_all_of_it() -> None:
    pool = BlockPool(8, 2)
    blocks = remember(pool, [1, 2, 3, 4, 5])
    assert pool.match([1, 2, 3, 4, 5, 6]) == blocks[:2]
    assert pool.match([1, 2, 3, 4]) == blocks[:1]
    assert pool.match([1, 2, 3, 9, 5]) == blocks[:1]
    assert pool.match([1, 2]) == []
    assert pool.match([9, 2, 3, 4, 5]) == []
    assert pool.match([]) == []


def test_equal_tokens_after_different_prefixes_are_different() -> None:
    pool = BlockPool(8, 2)
    remember(pool, [1, 2, 3, 4])
    remember(pool, [5, 6])
    assert len(pool.match([5, 6, 3, 4, 0])) == 1


def test_a_prefix_computed_twice_is_known_by_the_first_block() -> None:
    pool = BlockPool(8, 2)
    first, second = remember(pool, [1, 2, 3, 4]), remember(pool, [1, 2, 3, 4])
    assert pool.match([1, 2, 3, 4, 0]) == first
    pool.release(second)
    pool.release(first)
    pool.check_integrity()
    assert pool.match([1, 2, 3, 4, 0]) == first


def test_a_prefix_is_revived_from_the_free_blocks() -> None:
    pool = BlockPool(4, 2)
    blocks = remember(pool, [1, 2, 3, 4])
    pool.release(blocks)
    assert pool.num_free == 4
    found = pool.match([1, 2, 3, 4, 5])
    assert found == blocks
    assert all(pool.is_free(block) for block in found)
    pool.hold(found)
    assert pool.num_free == 2
    assert set(pool.allocate(2)).isdisjoint(found)
    pool.check_integrity()


def test_blocks_without_a_prefix_are_given_away_before_all_others() -> None:
    pool = BlockPool(4, 2)
    known = remember(pool, [1, 2])
    unknown = pool.allocate(3)
    pool.release(known)
    pool.release(unknown)
    assert set(pool.allocate(3)) == set(unknown)
    assert pool.allocate(1) == known


def test_the_least_recently_used_prefix_is_given_away_first_and_its_tail_before_its_head() -> None:
    pool = BlockPool(4, 2)
    a, b = remember(pool, [1, 2, 3, 4]), remember(pool, [5, 6, 7, 8])
    pool.release(a)
    pool.release(b)
    pool.hold(a)  # used again
    pool.release(a)
    assert pool.allocate(4) == [b[1], b[0], a[1], a[0]]


def test_a_block_given_away_is_no_prefix_any_more() -> None:
    pool = BlockPool(2, 2)
    pool.release(remember(pool, [1, 2, 3, 4]))
    pool.allocate(1)
    assert len(pool.match([1, 2, 3, 4, 5])) == 1
    pool.allocate(1)
    assert pool.match([1, 2, 3, 4, 5]) == []
    pool.check_integrity()


def test_what_follows_a_prefix_that_was_given_away_does_not_come_back_with_another() -> None:
    # A child names its parent by number. The number must die with the parent.
    pool = BlockPool(3, 2)
    parent, child = remember(pool, [1, 2, 3, 4])
    pool.release([parent])
    spare = pool.allocate(2)  # parent is given away, child is still held
    assert parent in spare
    pool.register(spare[0], ROOT, [9, 9])
    pool.register(spare[1], ROOT, [1, 2])
    assert pool.match([9, 9, 3, 4, 0]) == [spare[0]]
    assert pool.match([1, 2, 3, 4, 0]) == [spare[1]]
    pool.release([child])
    pool.check_integrity()


def test_a_forgotten_block_is_found_no_more_and_stays_held() -> None:
    pool = BlockPool(4, 2)
    blocks = remember(pool, [1, 2, 3, 4])
    pool.forget(blocks[1:])
    assert pool.match([1, 2, 3, 4, 5]) == blocks[:1]
    pool.check_integrity()
    assert pool.num_used == 2
    pool.release(blocks)
    pool.check_integrity()


def test_a_block_without_a_prefix_has_no_number() -> None:
    pool = BlockPool(2, 2)
    with pytest.raises(ValueError, match="holds no cached prefix"):
        pool.number_of(0)


def test_the_integrity_check_sees_a_leak_and_a_stale_prefix() -> None:
    pool = BlockPool(4, 2)
    blocks = remember(pool, [1, 2])
    pool._blocks[blocks[0]].references = 0
    with pytest.raises(RuntimeError, match="0 references, free: False"):
        pool.check_integrity()
    pool._blocks[blocks[0]].references = 1
    pool.check_integrity()
    pool._cached.clear()
    with pytest.raises(RuntimeError, match="a prefix that the cache does not know"):
        pool.check_integrity()
    pool._blocks[blocks[0]].key = None
    with pytest.raises(RuntimeError, match="0 cached prefixes, 0 blocks"):
        pool.check_integrity()


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_nothing_is_lost_or_confused_in_any_history(block_size: int) -> None:
    """Texts of two phrases, so that prefixes are often shared. `written` is what a KV cache would hold."""
    rng = random.Random(block_size)
    phrases = [[rng.randrange(100) for _ in range(block_size)] for _ in range(2)]
    pool = BlockPool(100, block_size)
    held: list[list[int]] = []
    written: dict[int, tuple[int, ...]] = {}  # block -> the text up to its end
    revived = 0
    for operation in range(40_000):
        if held and (rng.random() < 0.5 or pool.num_free < 10):
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            text = [token for _ in range(8) for token in rng.choice(phrases)][: rng.randrange(1, 8 * block_size + 1)]
            found = pool.match(text)
            for index, block in enumerate(found):
                assert written[block] == tuple(text[: (index + 1) * block_size]), "a match holds another text"
            revived += sum(pool.is_free(block) for block in found)
            pool.hold(found)
            fresh = pool.allocate(pool.blocks_for(len(text)) - len(found))
            others = {block for blocks in held for block in blocks}
            assert others.isdisjoint(fresh), "a block is given out twice"
            number = pool.number_of(found[-1]) if found else ROOT
            blocks = found + fresh
            for index in range(len(found), len(text) // block_size):
                end = (index + 1) * block_size
                written[blocks[index]] = tuple(text[:end])
                number = pool.register(blocks[index], number, text[end - block_size : end])
            held.append(blocks)
        if operation % 20 == 0:
            pool.check_integrity()
            assert pool.num_used == len({block for blocks in held for block in blocks})
    assert revived > 100
    for blocks in held:
        pool.release(blocks)
    pool.check_integrity()
    assert pool.num_used == 0
