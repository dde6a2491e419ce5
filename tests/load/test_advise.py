"""The best setting is found in few runs, and what is printed can be pasted."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2

from load import advise, drive, samples, settings
from load.plan import Model, Run
from load.search import Outcome, search
from load.server import ROOT, ServerError
from load.settings import BATCH, DELAY, SEATS
from load.slo import Slo
from tests.load.synthetic import run, text, traffic

LLM = Model("llm", "llm", 0, waits_until_full=False)
DYNAMIC = Model("llm_dynamic", "llm", 16, waits_until_full=False)
SLO = Slo.parse("ttft=1s")
REPOSITORY = ROOT / "model_repository"


class Machine:
    """Whose goodput is known for every setting."""

    def __init__(self, goodput: Callable[[dict[str, int]], float]) -> None:
        self.goodput = goodput
        self.asked: list[dict[str, int]] = []

    def measure(self, setting: dict[str, int]) -> Outcome:
        self.asked.append(setting)
        return Outcome(setting, goodput=self.goodput(setting), holds=True, e2el_p99=1.0)


def best(outcomes: list[Outcome]) -> dict[str, int]:
    return max(outcomes, key=lambda one: one.merit).setting


@pytest.mark.parametrize("optimum", settings.space(LLM)[SEATS])
def test_seats_are_found_in_few_runs(optimum: int) -> None:
    values = settings.space(LLM)[SEATS]
    machine = Machine(lambda setting: 10 - abs(values.index(setting[SEATS]) - values.index(optimum)))
    assert best(list(search(settings.space(LLM), machine.measure, 12))) == {SEATS: optimum}
    assert len(machine.asked) <= 6, "of 9"


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("delay", settings.space(DYNAMIC)[DELAY])
def test_batch_size_and_delay_are_found_in_few_runs(size: int, delay: int) -> None:
    space = settings.space(DYNAMIC)

    def goodput(setting: dict[str, int]) -> float:
        sizes, delays = (
            abs(space[name].index(setting[name]) - space[name].index(at))
            for name, at in ((BATCH, size), (DELAY, delay))
        )
        return 100 - 10 * sizes - 4 * delays

    machine = Machine(goodput)
    assert best(list(search(space, machine.measure, 40))) == {BATCH: size, DELAY: delay}
    assert len(machine.asked) <= 16, "of 43"


def test_no_setting_is_measured_twice_and_the_budget_is_kept() -> None:
    machine = Machine(lambda setting: setting[BATCH] + setting[DELAY] / 1e6)
    outcomes = list(search(settings.space(DYNAMIC), machine.measure, 7))
    assert len(outcomes) == 7
    assert len({tuple(setting.items()) for setting in machine.asked}) == 7


def test_a_batch_of_one_is_measured_with_one_delay_only() -> None:
    machine = Machine(lambda setting: 1 / setting[BATCH])
    assert best(list(search(settings.space(DYNAMIC), machine.measure, 40))) == {BATCH: 1, DELAY: 0}
    assert sum(setting[BATCH] == 1 for setting in machine.asked) == 1


def test_a_single_value_leaves_nothing_to_search() -> None:
    machine = Machine(lambda setting: 1.0)
    assert len(list(search({SEATS: [8]}, machine.measure, 12))) == 1


def test_among_equals_the_one_that_holds_wins_and_then_the_fastest() -> None:
    """A difference of less than two digits is noise, and no merit."""
    broken = Outcome({SEATS: 1}, goodput=2.04, holds=False, e2el_p99=1.0)
    holds = Outcome({SEATS: 2}, goodput=2.01, holds=True, e2el_p99=3.0)
    faster = Outcome({SEATS: 3}, goodput=1.99, holds=True, e2el_p99=2.0)
    more = Outcome({SEATS: 4}, goodput=2.2, holds=False, e2el_p99=9.0)
    assert sorted([more, faster, holds, broken], key=lambda one: one.merit) == [broken, holds, faster, more]


def config(text_of: str) -> Any:
    return text_format.Parse(text_of, model_config_pb2.ModelConfig())


def test_a_copy_gets_the_settings_and_keeps_everything_else(tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in (REPOSITORY / "sdxl").rglob("*") if file.is_file()}
    settings.copy_with({BATCH: 4, DELAY: 50_000}, REPOSITORY / "sdxl", tmp_path)
    made = config((tmp_path / "sdxl" / "config.pbtxt").read_text())
    assert made.max_batch_size == 4
    assert list(made.dynamic_batching.preferred_batch_size) == [4]
    assert made.dynamic_batching.max_queue_delay_microseconds == 50_000
    for field in ("max_batch_size", "dynamic_batching"):
        made.ClearField(field)
    expected = config((REPOSITORY / "sdxl" / "config.pbtxt").read_text())
    policy = expected.dynamic_batching.default_queue_policy
    assert config((tmp_path / "sdxl" / "config.pbtxt").read_text()).dynamic_batching.default_queue_policy == policy
    for field in ("max_batch_size", "dynamic_batching"):
        expected.ClearField(field)
    assert made == expected
    assert {file: file.read_bytes() for file in before} == before, "the model itself stays as it is"


def test_a_copy_finds_its_weights_from_anywhere(tmp_path: Path) -> None:
    settings.copy_with({SEATS: 8}, REPOSITORY / "llm", tmp_path)
    original = json.loads((REPOSITORY / "llm" / "1" / "model.json").read_text())
    made = json.loads((tmp_path / "llm" / "1" / "model.json").read_text())
    assert Path(made["model"]) == (REPOSITORY / original["model"]).resolve()
    assert made == original | {"model": made["model"], SEATS: 8}
    assert (tmp_path / "llm" / "config.pbtxt").read_bytes() == (REPOSITORY / "llm" / "config.pbtxt").read_bytes()


def test_a_models_name_on_a_hub_stays_one(tmp_path: Path) -> None:
    (tmp_path / "a" / "mine" / "1").mkdir(parents=True)
    (tmp_path / "a" / "mine" / "config.pbtxt").write_text('backend: "llm"')
    (tmp_path / "a" / "mine" / "1" / "model.json").write_text('{"model": "organisation/name"}')
    settings.copy_with({SEATS: 1024}, tmp_path / "a" / "mine", tmp_path / "b")
    made = json.loads((tmp_path / "b" / "mine" / "1" / "model.json").read_text())
    assert made["model"] == "organisation/name"


def test_an_engine_gets_enough_seats_and_tokens_for_the_batch(tmp_path: Path) -> None:
    settings.copy_with({BATCH: 1024, DELAY: 0}, REPOSITORY / "llm_dynamic", tmp_path)
    made = json.loads((tmp_path / "llm_dynamic" / "1" / "model.json").read_text())
    assert made[SEATS] == 1024
    assert made["max_num_batched_tokens"] == 1024


@pytest.mark.parametrize(("size", "block"), [(8, True), (1, False)])
def test_what_is_to_be_pasted_is_what_was_measured(size: int, block: bool, tmp_path: Path) -> None:
    setting = {BATCH: size, DELAY: 10_000 if block else 0}
    lines = settings.to_paste(setting, REPOSITORY / "sdxl").partition("\n\n")[2]
    settings.copy_with(setting, REPOSITORY / "sdxl", tmp_path)
    measured = config((tmp_path / "sdxl" / "config.pbtxt").read_text())
    pasted = config(lines)
    assert pasted.max_batch_size == measured.max_batch_size == size
    assert pasted.dynamic_batching == measured.dynamic_batching
    assert pasted.HasField("dynamic_batching") == measured.HasField("dynamic_batching") == block


def test_seats_are_pasted_into_model_json() -> None:
    assert '"max_num_seqs": 16,' in settings.to_paste({SEATS: 16}, REPOSITORY / "llm")


ONE = run("llm", traffic(2, outputs="fixed:3"))


def test_outcome_has_the_exact_figures(tmp_path: Path) -> None:
    taken = [text(0, 0.0, [0.5, 1.0, 1.5]), text(1, 0.0, [1.5, 1.75, 2.0]), text(2, 0.5, [1.0, 1.5, 2.0])]
    samples.write(tmp_path / drive.SAMPLES, taken)
    made = advise.outcome({SEATS: 8}, Slo.parse("ttft_p50=1s"), ONE, tmp_path)
    assert made.goodput == pytest.approx(2 / 2.0)
    assert made.throughput == pytest.approx(9 / 2.0)
    assert made.holds
    assert dict(made.observed) == {"ttft_p50": 0.5}
    assert made.mean_batch is None


def test_evidence_stands_best_first() -> None:
    outcomes = [
        Outcome({SEATS: 4}, 1.0, False, 10.0, (("ttft_p99", 2.0),), 3.0, 2.5),
        Outcome({SEATS: 16}, 2.0, True, 20.0, (("ttft_p99", 0.5),), 1.5, None),
        Outcome({SEATS: 256}, failure="no memory"),
    ]
    assert advise.evidence(outcomes, "llm").markdown() == (
        "| max_num_seqs | goodput req/s | SLO | ttft_p99 ms | E2EL p99 s | tokens/s | mean batch |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| 16 | 2.00 | holds | 500 | 1.50 | 20.0 |  |\n"
        "| 4 | 1.00 | broken | 2000 | 3.00 | 10.0 | 2.50 |\n"
        "| 256 | failed |  |  |  |  |  |\n"
    )


def said(*outcomes: Outcome) -> str:
    return advise.advice(outcomes, ONE, SLO, REPOSITORY / "llm")


def test_advice_is_the_best_setting() -> None:
    text_of = said(Outcome({SEATS: 4}, 1.0, True), Outcome({SEATS: 16}, 2.0, True), Outcome({SEATS: 64}, 1.5, True))
    assert "the best of 3 settings kept 2.00 requests per second" in text_of
    assert '"max_num_seqs": 16,' in text_of


def test_advice_says_when_it_is_worth_little() -> None:
    assert "no setting can keep to this SLO here" in said(Outcome({SEATS: 4}), Outcome({SEATS: 16}))
    assert "broke the SLO" in said(Outcome({SEATS: 4}, 1.0, holds=False))
    assert "All settings kept up" in said(Outcome({SEATS: 4}, 2.0, True, e2el_p99=2), Outcome({SEATS: 8}, 2.0, True))
    assert "nothing to advise" in said(Outcome({SEATS: 4}, failure="no memory"))
    assert "nothing to advise" in said()


# The command, with servers and Locust replaced


class Lab:
    """Answers each request later the further the seats are from 16, and counts what it measures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.measured: list[dict[str, int]] = []
        self.trouble: dict[int, BaseException] = {}
        monkeypatch.setattr(advise, "_measure", self.measure)
        self.folder = tmp_path / "mine"

    def measure(self, args: Any, one: Run, setting: dict[str, int], target: Path) -> None:
        if error := self.trouble.pop(setting[SEATS], None):
            raise error
        self.measured.append(setting)
        late = abs(settings.space(LLM)[SEATS].index(setting[SEATS]) - 4) * 0.3
        target.mkdir(parents=True)
        samples.write(target / drive.SAMPLES, [text(i, i / 10, [i / 10 + late * i, i / 10 + 2 * i]) for i in range(10)])
        (target / drive.RUN).write_text(json.dumps(one.as_dict()))

    def advise(self, *more: str) -> int:
        return advise.main(["--slo", "ttft=1s", "--arrivals", "poisson:2", "--name", str(self.folder), *more])


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Lab:
    return Lab(monkeypatch, tmp_path)


def test_command_finds_the_best_seats(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab.advise() == 0
    printed = capsys.readouterr().out
    assert '"max_num_seqs": 16,' in printed
    assert printed.startswith("| max_num_seqs |")
    assert (lab.folder / "advice.md").read_text() in printed
    assert len(lab.measured) <= 6


def test_an_interrupted_search_advises_by_what_it_has_and_goes_on(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.trouble[128] = KeyboardInterrupt()
    assert lab.advise() == 130
    assert re.search(r"\| 16 \|.*\n\| 2 \|", capsys.readouterr().out)
    before = list(lab.measured)
    assert lab.advise() == 0
    assert not any(setting in before for setting in lab.measured[len(before) :]), "nothing is measured twice"
    count = len(lab.measured)
    assert lab.advise("--seed", "1") == 0
    assert len(lab.measured) > count, "other requests are another measurement"


def test_a_setting_that_does_not_start_is_only_worth_nothing(lab: Lab, capsys: pytest.CaptureFixture[str]) -> None:
    lab.trouble[128] = ServerError("max_num_seqs is 128; allowed: less\nmore")
    assert lab.advise() == 0
    printed = capsys.readouterr().out
    assert "| 128 | failed |" in printed
    assert "max_num_seqs is 128; allowed: less" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nobody"], "models has 'nobody'; allowed: "),
        (["--requests", "0"], "requests is 0; allowed: at least 1"),
        (["--output-lengths", "long"], "output_lengths is 'long'; allowed: "),
        (["--sizes", "1,x"], "sizes is '1,x'; allowed: "),
    ],
)
def test_wrong_arguments_are_named(
    lab: Lab, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        lab.advise(*arguments)
    assert message in capsys.readouterr().err
    assert not lab.folder.exists()
