"""Random histories. The bench checks in every step that no decode waits and that everyone finds their own text."""

import random

import pytest
from engine.errors import InvalidRequest
from engine.sequence import FinishReason, Status

from tests.llm.scripted import EOS, WORD, Bench


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(("block_size", "blocks", "longest"), [(1, 24, 12), (3, 10, 15), (16, 5, 40)])
def test_every_request_gets_its_end_and_every_block_comes_back(
    block_size: int, blocks: int, longest: int, prefix_caching: bool
) -> None:
    rng = random.Random(block_size)
    bench = Bench(seats=5, budget=9, blocks=blocks, block_size=block_size, prefix_caching=prefix_caching)
    bench.next_token = lambda sequence: EOS if rng.random() < 0.1 else WORD
    texts = [[rng.randrange(5, 7) for _ in range(longest)] for _ in range(4)]
    alive: list[str] = []
    refused = aborted = 0
    for operation in range(18_000):
        dice = rng.random()
        if dice < 0.25 and len(alive) < 12:
            name = f"r{operation}."
            prompt = rng.choice(texts)[: rng.randint(0, longest)]
            try:
                bench.add(name, prompt, max_tokens=rng.randint(1, longest), ignore_eos=rng.random() < 0.1)
                alive.append(name)
            except InvalidRequest:
                refused += 1
        elif dice < 0.3 and alive:
            victim = alive.pop(rng.randrange(len(alive)))
            aborted += 1
            if bench.scheduler.is_idle:
                bench.abort(victim)
            elif rng.random() < 0.5:
                bench.step(meanwhile=lambda: bench.abort(victim))  # noqa: B023
            else:
                bench.abort(victim)
        elif not bench.scheduler.is_idle:
            bench.step()
        if operation % 10 == 0:
            bench.pool.check_integrity()
            for name in [name for name in alive if bench[name].status is Status.FINISHED]:
                alive.remove(name)
                bench.forget(name)
    bench.run()
    assert aborted > 300
    assert refused > 10
    assert bench.scheduler.num_preemptions > 50
    assert (bench.scheduler.num_cached_tokens > 500) == prefix_caching
    assert all(bench[name].finish_reason in (FinishReason.STOP, FinishReason.LENGTH) for name in alive)


def test_nobody_starves_under_constant_preemption() -> None:
    bench = Bench(seats=8, budget=16, blocks=9, block_size=2)
    for number in range(30):
        bench.add(f"r{number}.", 1 + number % 5, max_tokens=10)
    steps = 0
    while not bench.scheduler.is_idle:
        bench.step()
        steps += 1
        assert steps < 30 * 10 * 2, "some run over and over again"
    assert bench.scheduler.num_preemptions > 10
    order = [bench.first_tokens[f"r{number}."] for number in range(30)]
    assert order == sorted(order), "a preempted request keeps its place"
