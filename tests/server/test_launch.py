"""What scripts/launch.py makes of its arguments, and when it fetches weights."""

from pathlib import Path

import launch
import pytest

HOME = Path("/opt/tritonserver")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, weights in [("llm", launch.weights.WEIGHTS.name), ("llm_other", "elsewhere.gguf"), ("sdxl", "")]:
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.json").write_text(f'{{"model": "weights/{weights}"}}')
    return tmp_path


def fetches(repository: Path, *args: str) -> bool:
    models, rest = launch.split_models([f"--model-repository={repository}", *args])
    return any(launch.needs_weights(model) for model in launch.command_line(HOME, models, rest)[1])


def test_weights_are_fetched_only_for_models_that_name_them(repository: Path) -> None:
    assert fetches(repository)
    assert fetches(repository, "--models", "sdxl,llm")
    assert not fetches(repository, "--models", "sdxl,llm_other")


def test_weights_follow_tritonservers_own_model_control(repository: Path) -> None:
    explicit = "--model-control-mode=explicit"
    assert fetches(repository, explicit, "--load-model=llm")
    assert fetches(repository, explicit, "--load-model=*")
    assert not fetches(repository, explicit, "--load-model", "sdxl")
    assert fetches(repository, explicit), "any model may be loaded later"


def test_the_users_flags_replace_ours_and_stay_as_they_are(repository: Path) -> None:
    args = ["--model-repository", str(repository), "--http-address", "0.0.0.0", "--log-verbose=1"]
    command, _ = launch.command_line(HOME, None, args)
    assert command[0] == "/opt/tritonserver/bin/tritonserver"
    assert command[-len(args) :] == args
    ours = {flag.partition("=")[0] for flag in command[1 : -len(args)]}
    assert ours - {"--allow-gpu-metrics"} == {
        "--backend-config",
        "--backend-directory",
        "--cache-directory",
        "--grpc-address",
        "--metrics-address",
    }


def test_slow_models_are_waited_for_unless_the_user_says_how_long(repository: Path) -> None:
    config = ["--backend-config=python,shm-region-prefix-name=x", f"--model-repository={repository}"]
    assert "--backend-config=python,stub-timeout-seconds=600" in launch.command_line(HOME, None, config)[0]
    own = [*config, "--backend-config=python,stub-timeout-seconds=5"]
    assert sum("stub-timeout-seconds" in argument for argument in launch.command_line(HOME, None, own)[0]) == 1


def test_models_becomes_explicit_control(repository: Path) -> None:
    models, args = launch.split_models(["--a", "--models=llm,sdxl", "--b", "--", "--models", "c"])
    assert (models, args) == (["llm", "sdxl"], ["--a", "--b", "--models", "c"])
    command, _ = launch.command_line(HOME, models, [f"--model-repository={repository}"])
    assert {"--model-control-mode=explicit", "--load-model=llm", "--load-model=sdxl"} <= set(command)


def test_a_flag_of_ours_is_taken_out_wherever_it_stands_before_the_dashes() -> None:
    assert launch.take_flag(["--a", launch.AS_VLLM, "--b"], launch.AS_VLLM) == (True, ["--a", "--b"])
    tritonservers = ["--a", "--", launch.AS_VLLM]
    assert launch.take_flag(tritonservers, launch.AS_VLLM) == (False, tritonservers)


def test_the_last_of_several_values_counts() -> None:
    assert launch.values(["--http-port=1", "--http-port", "2", "--http-port=3"], "--http-port") == ["1", "2", "3"]


def test_of_our_own_repository_the_products_are_loaded_or_all() -> None:
    def loads(*args: str) -> set[str]:
        models, rest = launch.split_models(list(args))
        return {flag.partition("=")[2] for flag in launch.command_line(HOME, models, rest)[0] if "--load-model" in flag}

    assert loads() == {"llm", "sdxl"}
    assert loads("--models", "llm_static") == {"llm_static"}
    assert loads("--models=all") == {path.parent.name for path in launch.ROOT.glob("model_repository/*/config.pbtxt")}
    assert loads("--model-control-mode=poll") == set(), "then it is the user who decides"


def test_of_another_repository_all_models_are_loaded(repository: Path) -> None:
    command, directories = launch.command_line(HOME, None, [f"--model-repository={repository}"])
    assert not any("--load-model" in flag for flag in command)
    assert len(directories) == 3
