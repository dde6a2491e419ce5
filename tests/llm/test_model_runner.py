"""One pass over the weights: one bad row harms no other, and what it leaves behind harms nobody later."""

import copy
from collections.abc import Iterator

import pytest
import torch
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.llama import Llama
from engine.model_runner import ModelRunner, StepOutput
from engine.sampling_params import SamplingParams
from engine.sequence import FinishReason, Sequence
from engine.transformers_model import TransformersModel

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
    # K and V, 2 layers, 4 tokens, 2 heads of 16 floats: 2048 bytes
    assert ModelRunner(paged_model("llama"), config, frozenset()).num_blocks == 1_000_000 // 2048
    config = EngineConfig(model="llama", block_size=4, memory_fraction=0.0001, max_num_seqs=64)
    with pytest.raises(ConfigError, match=r"memory_fraction is 0\.0001: too little"):
        ModelRunner(paged_model("llama"), config, frozenset())


class TestDecoder:
    def test_is_ours_where_it_fits(self) -> None:
        config = EngineConfig(model="m", num_kv_blocks=8)
        assert type(ModelRunner(paged_model("llama"), config, frozenset()).decoder) is Llama
        assert type(ModelRunner(paged_model("qwen3"), config, frozenset()).decoder) is TransformersModel

    @pytest.mark.parametrize(("fast", "expected"), [(True, "int8"), (False, "none")])
    def test_quantizes_by_itself_where_it_is_fast(
        self, fast: bool, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr("engine.model_runner.has_fast_kernel", lambda weight: fast)
        config = EngineConfig(model="m", num_kv_blocks=8, quantization="auto")
        with caplog.at_level("INFO"):
            ModelRunner(paged_model("llama"), config, frozenset())
            ModelRunner(paged_model("qwen3"), config, frozenset())
        assert [record.getMessage() for record in caplog.records if record.name == "engine.model_runner"] == [
            f"the fused decoder, quantization {expected}",
            "transformers' decoder of a Qwen3ForCausalLM",
        ]

    @pytest.mark.parametrize(
        ("setting", "complaint"),
        [
            ({"decoder": "fused"}, "decoder is 'fused', but the model is a Qwen3ForCausalLM"),
            ({"quantization": "int8"}, "quantization is 'int8', but a Qwen3ForCausalLM is run by transformers"),
        ],
    )
    def test_says_what_it_can_not_do(self, setting: dict[str, str], complaint: str) -> None:
        config = EngineConfig(model="m", num_kv_blocks=8, **setting)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=complaint):
            ModelRunner(paged_model("qwen3"), config, frozenset())

    def test_rotary_embeddings_that_grow_with_the_text_are_left_to_transformers(self) -> None:
        model = copy.copy(paged_model("llama"))
        model.config = copy.deepcopy(model.config)
        model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        assert not Llama.fits(model)

    def test_eight_bits_change_no_answer_with_the_company(self) -> None:
        """Integers add up to the same in any order, so this holds to the bit, not only nearly."""
        prompts = [list(range(10, 10 + length)) for length in (3, 9, 17, 30)]

        def answers(together: bool) -> list[list[int]]:
            sequences = [
                Sequence(prompt, SamplingParams(temperature=0, max_tokens=20, logprobs=0), 0) for prompt in prompts
            ]
            groups = [sequences] if together else [[sequence] for sequence in sequences]
            for group in groups:
                Setting(quantization="int8").run([(number, sequence) for number, sequence in enumerate(group)])
            return [sequence.tokens for sequence in sequences]

        assert answers(together=True) == answers(together=False)
