"""What may be asked, and what a wrong request is told."""

import pytest
from pipeline.config import PipelineConfig
from pipeline.errors import InvalidRequest
from pipeline.request import DRAWN_SEEDS, ImageRequest, Sizes, Value, parse
from pipeline.schedulers import SCHEDULERS

CONFIG = PipelineConfig("model", steps=7, guidance_scale=3.5)
SIZES = Sizes(native=64, multiple=8, largest=128)


def read(parameters: dict[str, Value], config: PipelineConfig = CONFIG) -> ImageRequest:
    (request,) = parse(["a cat"], None, parameters, config, SIZES)
    return request


def test_defaults_come_from_the_configuration_and_the_model() -> None:
    request = read({})
    assert (request.steps, request.guidance_scale, request.width, request.height) == (7, 3.5, 64, 64)
    assert (request.scheduler, request.format, request.encoding) == ("euler", "png", "binary")


def test_another_scheduler_brings_its_own_defaults() -> None:
    request = read({"scheduler": "turbo"})
    assert (request.steps, request.guidance_scale, request.guided) == (4, 0.0, False)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("steps", 0, "an integer from 1 to 100"),
        ("steps", 101, "an integer from 1 to 100"),
        ("steps", 2.5, "an integer"),
        ("steps", True, "an integer"),
        ("steps", "many", "an integer"),
        ("seed", -2, "an integer from -1 to 9223372036854775807"),
        ("seed", 2**63, "an integer from -1"),
        ("guidance_scale", -0.1, "a number from 0 to 50"),
        ("guidance_scale", "nan", "a number from 0 to 50"),
        ("guidance_scale", float("inf"), "a number from 0 to 50"),
        ("guidance_scale", False, "a number from 0 to 50"),
        ("width", 63, "a multiple of 8 from 8 to 128"),
        ("height", 136, "a multiple of 8 from 8 to 128"),
        ("height", 0, "a multiple of 8 from 8 to 128"),
        ("scheduler", "eular", "one of euler, euler_a, dpm++_2m, ddim, turbo, lcm"),
        ("format", "gif", "one of png, jpeg, webp"),
        ("encoding", "hex", "one of binary, base64"),
        ("negative_prompt", 5, "a string"),
        ("generated_image", 1.5, "true or false"),
        ("timeout", -1, "an integer from 0"),
    ],
)
def test_a_wrong_value_is_told_with_its_field_and_what_is_allowed(name: str, value: Value, allowed: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read({name: value})
    assert str(caught.value).startswith(f"{name} is {value!r}; allowed: ")
    assert allowed in str(caught.value)


def test_an_unknown_parameter_is_refused_with_the_nearest_known() -> None:
    with pytest.raises(
        InvalidRequest, match=r"'guidance' .did you mean 'guidance_scale'.* is 3; allowed: negative_prompt, "
    ):
        read({"guidance": 3})


def test_parameters_of_triton_itself_are_let_through() -> None:
    assert read({"id": "7", "triton_enable_empty_final_response": True, "priority": 1}).steps == 7


def test_numbers_may_come_as_strings() -> None:
    request = read({"steps": "9", "guidance_scale": "2.5", "seed": "12", "generated_image": "true"})
    assert (request.steps, request.guidance_scale, request.seed, request.generated_image) == (9, 2.5, 12, True)


def test_a_seed_of_minus_one_draws_one_that_json_carries_exactly() -> None:
    seeds = {read({"seed": -1}).seed for _ in range(20)} | {read({}).seed for _ in range(20)}
    assert len(seeds) > 30
    assert all(0 <= seed < DRAWN_SEEDS for seed in seeds)


def test_many_prompts_count_the_seed_up_and_keep_their_own_negatives() -> None:
    requests = parse(["a", "b", "c"], ["x", "", "z"], {"seed": 2**63 - 2}, CONFIG, SIZES)
    assert [r.seed for r in requests] == [2**63 - 2, 2**63 - 1, 0]
    assert [r.negative_prompt for r in requests] == ["x", "", "z"]


def test_a_negative_prompt_comes_once() -> None:
    with pytest.raises(InvalidRequest, match="an input or a parameter, not both"):
        parse(["a"], ["x"], {"negative_prompt": "y"}, CONFIG, SIZES)


def test_texts_have_an_end() -> None:
    for prompt, negative in (("a" * 10_001, ""), ("a", "b" * 10_001)):
        with pytest.raises(InvalidRequest, match="at most 10000 characters, and it has 10001"):
            parse([prompt], [negative], {}, CONFIG, SIZES)


def test_no_scheduler_takes_more_steps_than_it_has() -> None:
    with pytest.raises(InvalidRequest, match="steps is 51; allowed: an integer from 1 to 50"):
        read({"scheduler": "lcm", "steps": 51})
    for name in SCHEDULERS:
        assert read({"scheduler": name, "steps": 50}).scheduler == name
