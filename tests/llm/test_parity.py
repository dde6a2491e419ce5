"""Batching, chunks, preemption and cached prefixes change nothing: token for token what transformers generates.

In float32, with random models. Greedy tokens could only differ where two logits tie, which random weights don't.
"""

import random

import pytest
import torch
from engine.attention.reference import Group, ReferenceAttention
from engine.sampling_params import SamplingParams
from engine.sequence import Sequence

from tests.llm.tiny_models import FAMILIES, VOCABULARY, Setting, expected, output_of

MAX_TOKENS = 20
ALL = 512  # a budget that takes every prompt whole


def prompts() -> list[tuple[int, ...]]:
    """Ten, of 1 to 40 tokens; some begin alike, and one comes twice."""
    rng = random.Random(3)
    made = [[rng.randrange(1, VOCABULARY) for _ in range(length)] for length in (40, 1, 13, 27, 8, 33)]
    made += [made[0][:30] + made[3][:5], made[0][:17], made[0], [*made[5][:16], 9]]
    return [tuple(prompt) for prompt in made]


def greedy(prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS) -> Sequence:
    return Sequence(list(prompt), SamplingParams(temperature=0, max_tokens=max_tokens), seed=0)


def random_arrivals(sequences: list[Sequence], seed: int) -> list[tuple[int, Sequence]]:
    rng = random.Random(seed)
    return [(rng.randrange(12), sequence) for sequence in sequences]


@pytest.mark.parametrize("family", FAMILIES)
def test_different_prompts_have_different_answers(family: str) -> None:
    # Else nothing below would prove anything.
    answers = {tuple(expected(family, prompt, MAX_TOKENS)[-8:]) for prompt in prompts()}
    assert len(answers) == len(set(prompts()))
    assert all(len(set(expected(family, prompt, MAX_TOKENS))) > 5 for prompt in prompts())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_alone_gets_what_transformers_generates(family: str) -> None:
    for prompt in prompts():
        sequence = greedy(prompt)
        Setting(family).run([(0, sequence)])
        assert output_of(sequence) == expected(family, prompt, MAX_TOKENS)


def check_batch(setting: Setting, batch: list[tuple[int, ...]]) -> None:
    rng = random.Random(setting.budget)
    sequences = [greedy(prompt, rng.randint(8, MAX_TOKENS)) for prompt in batch]
    setting.run(random_arrivals(sequences, seed=setting.budget))
    for sequence in sequences:
        want = expected(setting.family, tuple(sequence.prompt), MAX_TOKENS)[: sequence.params.max_tokens]
        assert output_of(sequence) == want, f"the prompt of {len(sequence.prompt)} tokens"


@pytest.mark.parametrize("pool", ["tight", "ample"])
@pytest.mark.parametrize("prefix_caching", [False, True], ids=["no_cache", "cache"])
@pytest.mark.parametrize("budget", [7, 64, ALL])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_gets_what_transformers_generates(family: str, budget: int, prefix_caching: bool, pool: str) -> None:
    num_blocks = 18 if pool == "tight" else 256
    setting = Setting(family, budget, 6, num_blocks, prefix_caching=prefix_caching)
    check_batch(setting, prompts())
    assert (setting.scheduler.num_preemptions > 0) == (pool == "tight")
    assert (setting.scheduler.num_cached_tokens >= 36) == prefix_caching


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_may_be_computed_one_token_at_a_time(family: str) -> None:
    setting = Setting(family, budget=1, seats=1)
    check_batch(setting, [prompts()[index] for index in (1, 2, 4)] + [prompts()[2]])
    assert setting.scheduler.num_cached_tokens == 12


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_size_of_a_block_does_not_matter(family: str, block_size: int) -> None:
    setting = Setting(family, budget=16, num_blocks=-(-72 // block_size), block_size=block_size)
    sequences = [greedy(prompt) for prompt in prompts()]
    setting.run(random_arrivals(sequences, seed=block_size))
    assert setting.scheduler.num_preemptions > 0
    for sequence in sequences:
        assert output_of(sequence) == expected(family, tuple(sequence.prompt), MAX_TOKENS)


@pytest.mark.parametrize(
    ("family", "lost"),
    [
        ("llama", "mask"),
        ("llama", "scale"),
        ("mistral", "window"),
        ("gemma2", "window"),
        ("gemma2", "softcap"),
        ("gemma3", "window"),
        ("gemma3", "scale"),
    ],
)
def test_an_attention_that_forgets_something_is_noticed(
    family: str, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The models above must depend on all that they are to prove.
    attend = ReferenceAttention.attend

    def forgetful(
        self: ReferenceAttention,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        plan: list[Group],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        scale = 1.0 if lost == "scale" else scale
        window = None if lost == "window" else window
        softcap = None if lost == "softcap" else softcap
        if lost == "mask":
            for group in plan:
                group.context_lens = group.context_lens + 1
        return attend(self, query, keys, values, plan, scale, window, softcap)

    monkeypatch.setattr("engine.attention.kernels", lambda: None)
    monkeypatch.setattr(ReferenceAttention, "attend", forgetful)
    different = 0
    for prompt in prompts()[:4]:
        sequence = greedy(prompt)
        Setting(family).run([(0, sequence)])
        different += output_of(sequence) != expected(family, prompt, MAX_TOKENS)
    assert different >= 3


# Random draws


def drawn(prompt: tuple[int, ...], seed: int) -> Sequence:
    params = SamplingParams(temperature=1.3, top_p=0.95, top_k=80, max_tokens=MAX_TOKENS, seed=seed)
    return Sequence(list(prompt), params, seed)


def test_a_seed_means_the_same_tokens_in_any_company() -> None:
    # vllm#51226: a neighbour without a seed changed the draws
    prompt = prompts()[2]
    alone = drawn(prompt, 5)
    Setting().run([(0, alone)])
    settings = [
        Setting(budget=7, seats=6),
        Setting(budget=1, seats=1),
        Setting(budget=16, num_blocks=16, seats=6),
        Setting(budget=16, num_blocks=16, seats=6, prefix_caching=False),
    ]
    preempted = 0
    for number, setting in enumerate(settings):
        seeded = [drawn(prompt, 5) for _ in range(3)]
        neighbours = [drawn(other, 100 + number) for other in prompts()[:3]] + [greedy(prompts()[3])]
        arrivals = random_arrivals([*neighbours, *seeded], seed=number)
        setting.run(arrivals)
        assert [output_of(sequence) for sequence in seeded] == [output_of(alone)] * 3
        preempted += setting.scheduler.num_preemptions
    assert preempted > 0


def test_two_seeds_draw_different_tokens() -> None:
    sequences = [drawn(prompts()[2], seed) for seed in range(20)]
    Setting(seats=20).run([(0, sequence) for sequence in sequences])
    assert len({tuple(output_of(sequence)) for sequence in sequences}) == 20


def test_a_draw_is_not_the_greedy_answer() -> None:
    sequences = [drawn(prompts()[2], 1), greedy(prompts()[2])]
    Setting().run([(0, sequence) for sequence in sequences])
    assert output_of(sequences[0]) != output_of(sequences[1])
