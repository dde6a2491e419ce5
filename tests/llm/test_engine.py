"""The loop: one answer for every request, whatever happens to it, to its step or to its consumer."""

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from engine.block_pool import BlockPool
from engine.engine import FAILURES_IN_A_ROW, Engine
from engine.errors import Cancelled, EngineFailure, InvalidRequest, QueueFull, TimedOut
from engine.generation import Delta, Generation
from engine.model_runner import StepOutput
from engine.sampler import Sampled
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler, Step
from engine.sequence import FinishReason, Sequence
from engine.tokenizer import Tokenizer

EOS = 0
SOON = 20.0  # seconds; far more than anything here takes


class Words(Tokenizer):
    """Token 7 is the text "7 "."""

    def __init__(self) -> None:
        self.eos_token_ids = frozenset([EOS])

    def decode(self, ids: object, *, skip_special: bool = True) -> str:
        return "".join(f"{token} " for token in ids)  # type: ignore[attr-defined]


class ScriptedRunner:
    """Counts up: a sequence's n-th token is n. Steps can be held, and can be made to fail."""

    vocab_size = 100

    def __init__(self) -> None:
        self.before: Callable[[Step], None] = lambda step: None
        self.next_token: Callable[[Sequence], int] = lambda sequence: sequence.num_output + 1
        self.failing: set[Sequence] = set()  # rows of NaN
        self.num_steps = 0
        self.in_step = threading.Semaphore(0)  # released when a step starts, while held
        self._go = threading.Semaphore(0)
        self._held = False

    def hold(self) -> None:
        """From now on every step waits for `go`."""
        self._held = True

    def go(self, steps: int = 1) -> None:
        self._go.release(steps)

    def free(self) -> None:
        self._held = False
        self._go.release(10_000)

    def wait_until_in_step(self) -> None:
        assert self.in_step.acquire(timeout=SOON)

    def run(self, step: Step) -> StepOutput:
        self.num_steps += 1
        if self._held:
            self.in_step.release()
            assert self._go.acquire(timeout=SOON)
        self.before(step)
        output = StepOutput()
        for entry in step.scheduled:
            if entry.sequence in self.failing:
                output.failed[entry.sequence] = "NaN"
            elif entry.samples:
                output.sampled[entry.sequence] = Sampled(self.next_token(entry.sequence))
        return output


class Consumer:
    """Drains one generation when told that there is something, and keeps every delta."""

    def __init__(self, engine: Engine, prompt_length: int = 3, **params: object) -> None:
        self.calls: queue.Queue[Generation] = queue.Queue()
        self.deltas: list[Delta] = []
        values = {"temperature": 0.0, "max_tokens": 5, **params}
        prompt = [100] * prompt_length
        (self.generation,) = engine.submit(prompt, SamplingParams(**values), self.calls.put)  # type: ignore[arg-type]

    def drain_once(self) -> Delta | None:
        delta = self.calls.get(timeout=SOON).drain()
        if delta:
            self.deltas.append(delta)
        return delta

    def finish(self) -> Delta:
        """Drain up to the last delta, and see that it is the last."""
        while not self.generation.finished:
            self.drain_once()
        assert self.generation.drain() is None
        assert [delta.finish_reason is not None for delta in self.deltas] == [False] * (len(self.deltas) - 1) + [True]
        return self.deltas[-1]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> list[int]:
        return [sampled.token for delta in self.deltas for sampled in delta.tokens]


class Engines:
    def __init__(self) -> None:
        self.runner = ScriptedRunner()
        self.all: list[Engine] = []

    def start(
        self,
        *,
        seats: int = 4,
        budget: int = 16,
        blocks: int = 64,
        block_size: int = 4,
        queue_size: int = 100,
        queued_tokens: int | None = None,
    ) -> Engine:
        scheduler = Scheduler(BlockPool(blocks, block_size), Limits(seats, budget, 1000), frozenset([EOS]))
        engine = Engine(self.runner, Words(), scheduler, max_queue_size=queue_size, max_queued_tokens=queued_tokens)
        self.all.append(engine)
        return engine


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Engines that, when the test is over, end by themselves with every block free, unless they have failed."""
    made = Engines()
    yield made
    made.runner.free()
    for engine in made.all:
        close(engine)
        if not engine.failure:
            engine.scheduler.pool.check_integrity()
            assert engine.scheduler.pool.num_used == 0


def close(engine: Engine) -> None:
    thread = threading.Thread(target=engine.close, daemon=True)
    thread.start()
    thread.join(SOON)
    assert not thread.is_alive(), "close() hangs"


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.001)


def test_a_request_gets_its_tokens_and_one_end(engines: Engines) -> None:
    consumer = Consumer(engines.start())
    last = consumer.finish()
    assert consumer.text == "1 2 3 4 5 "
    assert consumer.tokens == [1, 2, 3, 4, 5]
    assert (last.finish_reason, last.error) == (FinishReason.LENGTH, None)


def test_many_requests_share_the_engine(engines: Engines) -> None:
    engine = engines.start()
    consumers = [Consumer(engine, prompt_length=1 + number % 30, max_tokens=1 + number) for number in range(40)]
    for number, consumer in enumerate(consumers):
        consumer.finish()
        assert consumer.tokens == list(range(1, number + 2))


def test_an_idle_engine_sleeps_and_wakes(engines: Engines) -> None:
    # vllm#15996: it spun
    engine = engines.start()
    for _ in range(3):
        Consumer(engine).finish()
        wait_for(lambda: engine.stats.running == 0)
        busy = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - busy < 0.05, "seconds of CPU time"


def test_a_prompt_that_never_fits_is_refused_at_once(engines: Engines) -> None:
    engine = engines.start(blocks=4)
    with pytest.raises(InvalidRequest, match="16 tokens; allowed: at most 15"):
        Consumer(engine, prompt_length=16)
    consumer = Consumer(engine, prompt_length=15)
    assert consumer.finish().finish_reason is FinishReason.LENGTH
    assert consumer.tokens == [1]


def test_a_full_queue_refuses_one_more_and_takes_it_later(engines: Engines) -> None:
    engine = engines.start(seats=2, queue_size=3)
    engines.runner.hold()
    consumers = [Consumer(engine) for _ in range(5)]
    with pytest.raises(QueueFull, match="3 waiting; allowed: 3"):
        Consumer(engine)
    engines.runner.free()
    for consumer in consumers:
        assert consumer.finish().finish_reason is FinishReason.LENGTH
    assert Consumer(engine).finish().finish_reason is FinishReason.LENGTH


def test_a_queue_full_of_tokens_refuses_long_prompts_and_takes_short_ones(engines: Engines) -> None:
    engine = engines.start(seats=1, queued_tokens=10)
    engines.runner.hold()
    first = Consumer(engine, prompt_length=12)  # there is a seat: nothing waits
    engines.runner.wait_until_in_step()
    second = Consumer(engine, prompt_length=6)
    with pytest.raises(QueueFull, match="1 waiting with 6 tokens, and this request has 5; allowed: 10"):
        Consumer(engine, prompt_length=5)
    third = Consumer(engine, prompt_length=4)
    engines.runner.free()
    for consumer in (first, second, third):
        assert consumer.finish().finish_reason is FinishReason.LENGTH


def test_time_limits_end_those_who_set_them_and_nobody_else(engines: Engines) -> None:
    engine = engines.start(seats=1)
    engines.runner.hold()
    running = Consumer(engine, max_tokens=3, max_queue_time=0.05)
    engines.runner.wait_until_in_step()
    in_time = Consumer(engine, max_queue_time=SOON, max_time=SOON)
    too_late = Consumer(engine, max_queue_time=0.05)
    not_done = Consumer(engine, max_time=0.05)
    time.sleep(0.06)
    engines.runner.go()
    assert str(too_late.finish().error).endswith("; max_queue_time is 0.05")
    assert str(not_done.finish().error).endswith("; max_time is 0.05")
    engines.runner.free()
    assert running.finish().finish_reason is FinishReason.LENGTH, "who has a seat is not in the queue"
    assert in_time.finish().finish_reason is FinishReason.LENGTH


def test_a_time_limit_ends_what_runs_too(engines: Engines) -> None:
    engine = engines.start()
    engines.runner.before = lambda step: time.sleep(0.01)
    hasty, patient = Consumer(engine, max_tokens=500, max_time=0.1), Consumer(engine, max_tokens=30)
    assert isinstance(hasty.finish().error, TimedOut)
    assert 1 <= len(hasty.tokens) < 500
    assert patient.finish().finish_reason is FinishReason.LENGTH


def test_a_token_that_the_model_does_not_have_is_refused_at_once(engines: Engines) -> None:
    with pytest.raises(InvalidRequest, match="allowed_token_ids holds 100; allowed: token ids below 100"):
        Consumer(engines.start(), allowed_token_ids=(99, 100))


def test_an_unseeded_request_draws_its_own_seed(engines: Engines) -> None:
    # mlx-vlm#1818: an omitted seed was 0, and all answers were equal
    engine = engines.start()
    seeds = {Consumer(engine).generation.sequence.seed for _ in range(20)}
    assert len(seeds) == 20
    assert Consumer(engine, seed=7).generation.sequence.seed == 7


# Cancelling


def ended_by_cancel(consumer: Consumer) -> None:
    last = consumer.finish()
    assert last.finish_reason is FinishReason.ABORT
    assert isinstance(last.error, Cancelled)


def test_cancel_while_queued(engines: Engines) -> None:
    engine = engines.start(seats=1)
    engines.runner.hold()
    first, second = Consumer(engine), Consumer(engine)
    engine.cancel(second.generation)
    engines.runner.free()
    ended_by_cancel(second)
    assert second.tokens == []
    assert first.finish().finish_reason is FinishReason.LENGTH


def test_cancel_in_the_middle_of_a_prompt(engines: Engines) -> None:
    engine = engines.start(budget=4)
    engines.runner.hold()
    consumer = Consumer(engine, prompt_length=50)
    for _ in range(3):
        engines.runner.wait_until_in_step()
        engines.runner.go()
    engines.runner.wait_until_in_step()
    engine.cancel(consumer.generation)
    engines.runner.free()
    ended_by_cancel(consumer)
    wait_for(lambda: engine.stats.running == 0)
    assert engines.runner.num_steps == 4


def test_cancel_while_decoding_keeps_what_was_said(engines: Engines) -> None:
    engine = engines.start()
    engines.runner.hold()
    consumer = Consumer(engine, max_tokens=100)
    engines.runner.go(3)
    wait_for(lambda: engine.stats.output_tokens == 3)
    engine.cancel(consumer.generation)
    engines.runner.free()
    ended_by_cancel(consumer)
    assert consumer.tokens == [1, 2, 3]


def test_cancel_while_preempted(engines: Engines) -> None:
    engine = engines.start(blocks=4)
    engines.runner.hold()
    first, second = Consumer(engine, max_tokens=12), Consumer(engine, max_tokens=12)
    while not engine.stats.preemptions:
        engines.runner.wait_until_in_step()
        engines.runner.go()
        time.sleep(0.002)
    engine.cancel(second.generation)
    engines.runner.free()
    ended_by_cancel(second)
    assert first.finish().finish_reason is FinishReason.LENGTH
    assert first.tokens == list(range(1, 13))


def test_cancel_while_the_last_step_runs(engines: Engines) -> None:
    # vllm#26400
    engine = engines.start()
    engines.runner.hold()
    consumer, other = Consumer(engine, max_tokens=1), Consumer(engine, max_tokens=2)
    engines.runner.wait_until_in_step()
    engine.cancel(consumer.generation)
    engines.runner.free()
    ended_by_cancel(consumer)
    assert consumer.tokens == []
    assert other.finish().finish_reason is FinishReason.LENGTH


def test_cancel_twice_and_after_the_end_is_harmless(engines: Engines) -> None:
    engine = engines.start()
    engines.runner.hold()
    consumer = Consumer(engine)
    engine.cancel(consumer.generation)
    engine.cancel(consumer.generation)
    engines.runner.free()
    ended_by_cancel(consumer)
    engine.cancel(consumer.generation)
    done = Consumer(engine)
    assert done.finish().finish_reason is FinishReason.LENGTH
    engine.cancel(done.generation)
    assert Consumer(engine).finish().finish_reason is FinishReason.LENGTH
    assert done.generation.drain() is None


def test_cancelling_another_engines_request_is_harmless(engines: Engines) -> None:
    engine, other = engines.start(), engines.start()
    stranger = Consumer(other)
    stranger.finish()
    engine.cancel(stranger.generation)
    assert Consumer(engine).finish().finish_reason is FinishReason.LENGTH


# Failing


def test_a_step_that_raises_ends_its_requests_and_no_others(engines: Engines) -> None:
    engine = engines.start(seats=2)
    engines.runner.hold()
    hit = [Consumer(engine)]
    engines.runner.wait_until_in_step()
    hit.append(Consumer(engine))
    waiting = Consumer(engine)

    def second_fails(step: Step) -> None:
        if engines.runner.num_steps == 2:
            raise OSError("no device for this step")

    engines.runner.before = second_fails
    engines.runner.free()
    for consumer in hit:
        last = consumer.finish()
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, EngineFailure)
        assert "OSError: no device for this step" in str(last.error)
    assert waiting.finish().finish_reason is FinishReason.LENGTH
    assert engine.failure is None


def test_failures_in_a_row_stop_the_engine_with_an_error_for_all(engines: Engines) -> None:
    engine = engines.start(seats=1)
    engines.runner.hold()

    def broken(step: Step) -> None:
        raise OSError("device lost")

    engines.runner.before = broken
    consumers = [Consumer(engine) for _ in range(FAILURES_IN_A_ROW + 3)]
    engines.runner.free()
    for number, consumer in enumerate(consumers):
        last = consumer.finish()
        assert last.finish_reason is FinishReason.ERROR
        assert isinstance(last.error, EngineFailure)
        stopped = number >= FAILURES_IN_A_ROW - 1
        assert ("the engine has stopped: OSError: device lost" in str(last.error)) == stopped
    assert isinstance(engine.failure, OSError)
    with pytest.raises(EngineFailure, match="the engine has stopped: device lost"):
        Consumer(engine)
    engine.cancel(consumers[0].generation)  # as harmless as ever


def test_a_step_that_works_forgives_the_failures_before_it(engines: Engines) -> None:
    engine = engines.start(seats=1)
    for _ in range(3):

        def broken(step: Step) -> None:
            raise OSError("device busy")

        engines.runner.before = broken
        for _ in range(FAILURES_IN_A_ROW - 1):
            assert Consumer(engine).finish().finish_reason is FinishReason.ERROR
        engines.runner.before = lambda step: None
        assert Consumer(engine).finish().finish_reason is FinishReason.LENGTH
    assert engine.failure is None


def test_a_row_of_nan_ends_one_request(engines: Engines) -> None:
    # vllm#1623: one row killed the whole batch
    engine = engines.start()
    engines.runner.hold()
    bad, good = Consumer(engine), Consumer(engine)
    engines.runner.failing.add(bad.generation.sequence)
    engines.runner.free()
    last = bad.finish()
    assert (last.finish_reason, str(last.error)) == (FinishReason.ERROR, "NaN")
    assert isinstance(last.error, EngineFailure)
    assert good.finish().finish_reason is FinishReason.LENGTH


# Closing


def test_close_finishes_what_runs_and_what_waits(engines: Engines) -> None:
    engine = engines.start(seats=1)
    engines.runner.hold()
    consumers = [Consumer(engine) for _ in range(4)]
    closing = threading.Thread(target=engine.close)
    closing.start()
    wait_for(lambda: engine._stopping)
    with pytest.raises(EngineFailure, match="the model is being unloaded"):
        Consumer(engine)
    engines.runner.free()
    closing.join(SOON)
    assert not closing.is_alive()
    for consumer in consumers:
        assert consumer.finish().finish_reason is FinishReason.LENGTH
        assert consumer.tokens == [1, 2, 3, 4, 5]


def test_an_idle_engine_closes_at_once_and_twice(engines: Engines) -> None:
    engine = engines.start()
    close(engine)
    close(engine)


# Handing over


def test_a_slow_consumer_gets_everything_in_one_delta_and_holds_nobody_up(engines: Engines) -> None:
    engine = engines.start()
    slow = Consumer(engine, max_tokens=200)
    quick = Consumer(engine, max_tokens=200)
    quick.finish()
    wait_for(lambda: engine.stats.running == 0)
    assert slow.calls.qsize() == 1, "told once until it drains"
    slow.finish()
    assert len(slow.deltas) == 1
    assert slow.tokens == list(range(1, 201))


def test_a_consumer_who_drains_at_once_gets_each_token_by_itself(engines: Engines) -> None:
    engine = engines.start()
    engines.runner.hold()
    consumer = Consumer(engine, max_tokens=4)
    for number in range(1, 5):
        engines.runner.go()
        delta = consumer.drain_once()
        assert delta is not None
        assert delta.text == f"{number} "
    assert consumer.generation.finished


def test_a_stop_string_ends_a_request_early(engines: Engines) -> None:
    engine = engines.start(seats=1)
    consumer = Consumer(engine, max_tokens=900, stop=("3 4",))
    waiting = Consumer(engine)
    last = consumer.finish()
    assert (consumer.text, last.finish_reason, last.error) == ("1 2 ", FinishReason.STOP, None)
    assert waiting.finish().finish_reason is FinishReason.LENGTH  # the seat is free


def test_the_counts_are_true(engines: Engines) -> None:
    engine = engines.start(seats=2)
    engines.runner.hold()
    consumers = [Consumer(engine, prompt_length=5, max_tokens=3) for _ in range(3)]
    wait_for(lambda: engines.runner.num_steps == 1)
    engines.runner.go()
    wait_for(lambda: engine.stats.steps == 1)
    stats = engine.stats
    assert stats.kv_blocks == 64
    assert stats.kv_blocks_used > 0
    assert stats.running >= 1
    engines.runner.free()
    for consumer in consumers:
        consumer.finish()
    stats = engine.stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert (stats.prompt_tokens, stats.output_tokens) == (15, 9)
    assert stats.steps == engines.runner.num_steps
    # The loop says so itself, before anyone hears of the last token.
    assert stats.kv_blocks_used == 0


@pytest.mark.parametrize("seed", range(3))
def test_everyone_gets_exactly_one_end_while_threads_race(engines: Engines, seed: int) -> None:
    engine = engines.start(seats=4, blocks=24, queue_size=10_000)
    ends: list[FinishReason] = []
    problems: list[str] = []

    def client(number: int) -> None:
        rng = random.Random(seed * 100 + number)
        for _ in range(25):
            consumer = Consumer(engine, rng.randint(1, 30), max_tokens=rng.randint(1, 30), stop=("17 ",))
            cancels = rng.random() < 0.5
            finals = 0
            while True:
                if cancels and rng.random() < 0.3:
                    engine.cancel(consumer.generation)
                try:
                    generation = consumer.calls.get(timeout=0.05 if finals else SOON)
                except queue.Empty:
                    if not finals:
                        problems.append("no end")
                    break
                delta = generation.drain()
                if delta and delta.finish_reason:
                    finals += 1
                    ends.append(delta.finish_reason)
                    consumer.deltas.append(delta)
                    if rng.random() < 0.9:
                        break
            if finals != 1:
                problems.append(f"{finals} ends")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems
    assert len(ends) == 150
    assert set(ends) == {FinishReason.ABORT, FinishReason.LENGTH, FinishReason.STOP}


def test_several_answers_have_seeds_and_ends_of_their_own(engines: Engines) -> None:
    engine = engines.start(seats=3)
    engines.runner.next_token = lambda sequence: (sequence.seed + 1) % 2**64
    calls: queue.Queue[Generation] = queue.Queue()
    generations = engine.submit([1, 2], SamplingParams(n=3, seed=-2, max_tokens=2), calls.put)
    tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while not all(generation.finished for generation in generations):
        generation = calls.get(timeout=SOON)
        if delta := generation.drain():
            tokens[generation.index] += [sampled.token for sampled in delta.tokens]
    assert tokens == {0: [2**64 - 1] * 2, 1: [0], 2: [1] * 2}, "0 is an end token here"


def test_a_queue_takes_all_answers_of_a_request_or_none(engines: Engines) -> None:
    engine = engines.start(seats=2, queue_size=1)
    engines.runner.hold()
    first = Consumer(engine)
    with pytest.raises(QueueFull):
        engine.submit([1], SamplingParams(n=3), lambda ready: None)
    second, third = Consumer(engine), Consumer(engine)
    engines.runner.free()
    for consumer in (first, second, third):
        assert consumer.finish().finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 GB")])
def test_a_step_that_runs_out_of_memory_is_tried_again_smaller(engines: Engines, error: Exception) -> None:
    engine = engines.start(seats=6, budget=24)
    sizes: list[int] = []

    def little_memory(step: Step) -> None:
        sizes.append(step.num_tokens)
        if step.num_tokens > 4:
            raise error

    engines.runner.before = little_memory
    engines.runner.hold()
    consumers = [Consumer(engine, prompt_length=4, max_tokens=5) for _ in range(6)]
    engines.runner.free()
    for consumer in consumers:
        assert consumer.finish().finish_reason is FinishReason.LENGTH
        assert consumer.tokens == [1, 2, 3, 4, 5]
    assert max(sizes) > 4
    engines.runner.before = lambda step: None
    wait_for(lambda: engine.stats.running == 0)
    consumers = [Consumer(engine, prompt_length=4) for _ in range(6)]
    for consumer in consumers:
        assert consumer.finish().finish_reason is FinishReason.LENGTH
    assert engine.failure is None


def test_memory_that_is_too_small_for_one_token_ends_the_request(engines: Engines) -> None:
    engine = engines.start()

    def none_at_all(step: Step) -> None:
        raise MemoryError("none at all")

    engines.runner.before = none_at_all
    assert "none at all" in str(Consumer(engine).finish().error)
    engines.runner.before = lambda step: None
    assert Consumer(engine).finish().finish_reason is FinishReason.LENGTH
