"""One pass over the weights: one bad row harms no other, and what it leaves behind harms nobody later."""

from collections.abc import Iterator

import pytest
import torch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model_runner import ModelRunner, StepOutput
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence

from tests.llm.tiny_models import Setting, expected, output_of, paged_model

POISON = 50  # a token whose embedding is NaN in the tests that ask for it


@pytest.fixture
def poison() -> Iterator[None]:
    weight = paged_model("llama").get_input_embeddings().weight
    with torch.no_grad():
        healthy = weight[POISON].clone()
        weight[POISON] = float("nan")
        yield
        weight[POISON] = healthy


def greedy(prompt: list[int], max_tokens: int = 6) -> Sequence:
    return Sequence(prompt, SamplingParams(temperature=0, max_tokens=max_tokens), seed=0)


def step(setting: Setting) -> StepOutput:
    """As the engine does it."""
    step = setting.scheduler.schedule()
    output = setting.runner.run(step)
    for sequence in output.failed:
        setting.scheduler.end(sequence, FinishReason.ERROR)
    setting.scheduler.finish(step, {sequence: sampled.token for sequence, sampled in output.sampled.items()})
    return output


def run(setting: Setting) -> dict[Sequence, str]:
    failed: dict[Sequence, str] = {}
    while not setting.scheduler.is_idle:
        failed |= step(setting).failed
    return failed


PROMPTS = [[3, 4, 5], [9, 8, 7, 6, 5, 4, 3, 2, 1], [11], [12, 13, 14, 15, 16]]


@pytest.mark.usefixtures("poison")
def test_a_row_of_nan_fails_and_its_neighbours_do_not() -> None:
    setting = Setting()
    bad, good = greedy([5, POISON, 6]), [greedy(prompt) for prompt in PROMPTS]
    for sequence in [good[0], bad, *good[1:]]:
        setting.scheduler.add(sequence)
    assert run(setting) == {bad: "the model computed NaN or infinite logits"}
    assert [output_of(sequence) for sequence in good] == [expected("llama", tuple(p), 6) for p in PROMPTS]


@pytest.mark.usefixtures("poison")
def test_nan_left_in_a_block_does_not_reach_its_next_owner() -> None:
    # A masked slot takes part in the product with weight 0, and 0 * NaN is NaN.
    setting = Setting(num_blocks=4, prefix_caching=False)
    bad = greedy([POISON] * 15)
    setting.scheduler.add(bad)
    assert list(run(setting)) == [bad]
    for prompt in PROMPTS:
        sequence = greedy(prompt)
        setting.scheduler.add(sequence)
        assert run(setting) == {}
        assert output_of(sequence) == expected("llama", tuple(prompt), 6)


def test_a_step_without_a_last_token_samples_nothing() -> None:
    setting = Setting(budget=4, seats=4)
    setting.scheduler.add(greedy([1, 2, 3, 4, 5, 6]))
    assert step(setting) == StepOutput()
    assert len(step(setting).sampled) == 1


def test_end_tokens_are_masked_until_min_tokens() -> None:
    prompt = (3, 4, 5)
    ends = frozenset(expected("llama", prompt, 6)[:2])
    setting = Setting(eos_token_ids=ends)
    patient = Sequence(list(prompt), SamplingParams(temperature=0, max_tokens=30, min_tokens=8), seed=0)
    hasty = greedy(list(prompt))
    for sequence in (patient, hasty):
        setting.scheduler.add(sequence)
    run(setting)
    assert len(output_of(hasty)) == 1
    assert ends.isdisjoint(output_of(patient)[:8])


def test_a_memory_fraction_pays_for_blocks_of_the_models_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.model_runner._available_memory", lambda: 10_000_000)
    config = EngineConfig(model="llama", block_size=4, memory_fraction=0.1, max_num_seqs=64)
    # K and V, 2 layers, 4 tokens, 2 heads of 12 floats: 1536 bytes
    assert ModelRunner(paged_model("llama"), config, frozenset()).num_blocks == 1_000_000 // 1536
    config = EngineConfig(model="llama", block_size=4, memory_fraction=0.0001, max_num_seqs=64)
    with pytest.raises(ConfigError, match=r"memory_fraction is 0\.0001: too little"):
        ModelRunner(paged_model("llama"), config, frozenset())
