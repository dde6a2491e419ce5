"""What is counted and timed is what happened, once for each request."""

from engine.scheduler import Scheduled, Step
from engine.sequence import FinishReason, Sequence
from engine.stats import Distribution, Histogram, Recorder

from tests.llm.scripted import Bench, request


def values(distribution: Distribution) -> int:
    return sum(distribution.counts)


def test_a_value_on_a_border_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 7.0):
        histogram.add(value)
    assert histogram.snapshot() == Distribution((1.0, 2.0), (2, 2, 1), 12.0)


def test_times_of_a_request_from_its_arrival_to_its_last_token() -> None:
    recorder = Recorder()
    sequence = request([1, 2])
    sequence.times.arrived = 10.0
    for number, (begin, end) in enumerate(((13.0, 14.0), (14.0, 14.5), (15.0, 15.25))):
        step = Step([Scheduled(sequence, 1 if number else 2)])
        recorder.seated(step, begin)
        recorder.stepped(step, end)
        sequence.tokens.append(7)
        sequence.finish_reason = FinishReason.LENGTH if number == 2 else None
        recorder.token(sequence, end)
    stats = recorder.snapshot(Bench().scheduler)
    totals = {name: each.total for name, each in stats.distributions.items()}
    assert totals == {
        "queue_time": 3.0,
        "ttft": 4.0,
        "itl": 0.5 + 0.75,
        "tpot": 1.25 / 2,
        "e2el": 5.25,
        "step_time": 1.0 + 0.5 + 0.25,
        "step_tokens": 4.0,
        "step_requests": 3.0,
        "prompt_tokens": 2.0,
        "output_tokens": 3.0,
        "n": 1.0,
    }
    assert {name: values(each) for name, each in stats.distributions.items()} == {
        **dict.fromkeys(("queue_time", "ttft", "tpot", "e2el", "prompt_tokens", "output_tokens", "n"), 1),
        **dict.fromkeys(("step_time", "step_tokens", "step_requests"), 3),
        "itl": 2,
    }
    assert stats.ended[FinishReason.LENGTH] == 1
    assert (stats.steps, stats.output_tokens) == (3, 3)


def test_a_snapshot_does_not_change() -> None:
    recorder, scheduler = Recorder(), Bench().scheduler
    before = recorder.snapshot(scheduler)
    one: Sequence = request([1])
    one.tokens.append(2)
    recorder.token(one, 1.0)
    recorder.ended(FinishReason.ABORT)
    assert before.output_tokens == sum(before.ended.values()) == values(before.distributions["ttft"]) == 0
