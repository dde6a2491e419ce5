"""Which tokens each step computes, traced by hand. `"a1 b1 c6"`: one token of a, one of b, six of c."""

from collections.abc import Callable

import pytest
from engine.errors import InvalidRequest
from engine.sequence import FinishReason, Status

from tests.llm.scripted import EOS, WORD, Bench, request


def test_a_prompt_is_computed_at_once_and_then_decoded_token_by_token() -> None:
    bench = Bench()
    a = bench.add("a", 5, max_tokens=3)
    assert bench.run() == ["a5", "a1", "a1"]
    assert a.finish_reason is FinishReason.LENGTH
    assert a.tokens == [*a.prompt, WORD, WORD, WORD]


def test_a_long_prompt_is_cut_into_chunks_of_the_budget() -> None:
    bench = Bench(budget=8)
    bench.add("a", 20, max_tokens=2)
    assert bench.run() == ["a8", "a8", "a4", "a1"]


def test_chunks_fill_what_decodes_leave_of_the_budget() -> None:
    bench = Bench(budget=8)
    bench.add("a", 3, max_tokens=6)
    bench.add("b", 3, max_tokens=6)
    first = bench.step()
    bench.add("c", 14, max_tokens=1)
    assert [first, *bench.run()] == ["a3 b3", "a1 b1 c6", "a1 b1 c6", "a1 b1 c2", "a1 b1", "a1 b1"]


def test_what_one_prompt_leaves_of_the_budget_the_next_one_uses() -> None:
    bench = Bench(budget=8)
    for name in "abc":
        bench.add(name, 6, max_tokens=2)
    assert bench.run() == ["a6 b2", "a1 b4 c3", "b1 c3", "c1"]


def test_the_last_single_token_of_a_prompt_stands_among_the_decodes() -> None:
    bench = Bench(budget=8)
    bench.add("a", 1, max_tokens=3)
    bench.add("b", 8, max_tokens=1)
    bench.add("c", 2, max_tokens=1)
    # b has one token left in the second step: it goes before c's two
    assert bench.run() == ["a1 b7", "a1 b1 c2", "a1"]


def test_a_budget_of_one_token_serves_one_sequence() -> None:
    bench = Bench(budget=1, seats=1)
    bench.add("a", 3, max_tokens=2)
    bench.add("b", 1, max_tokens=1)
    assert bench.run() == ["a1", "a1", "a1", "a1", "b1"]


def test_no_more_run_than_there_are_seats_and_a_seat_is_taken_in_the_step_after_it_is_free() -> None:
    bench = Bench(seats=2)
    for name in "abc":
        bench.add(name, 2, max_tokens=2)
    assert bench.run() == ["a2 b2", "a1 b1", "c2", "c1"]


def test_a_newcomer_joins_while_others_decode() -> None:
    bench = Bench()
    bench.add("a", 2, max_tokens=4)
    trace = bench.steps(2)
    bench.add("b", 2, max_tokens=2)
    assert trace + bench.run() == ["a2", "a1", "a1 b2", "a1 b1"]


def test_no_decode_misses_a_step_while_long_prompts_keep_arriving() -> None:
    # sglang#32549, vllm#54919: one long prompt starved all decodes
    bench = Bench(seats=12, budget=64, blocks=2000, block_size=16)
    for index in range(8):
        bench.add(f"d{index}", 4)
    bench.step()
    for number in range(40):
        bench.add(f"p{number}", 400, max_tokens=1)
        line = bench.step().split()
        assert line[:8] == [f"d{index}1" for index in range(8)]
        assert line[8:], "the prompts get on, too"
    assert all(bench[f"d{index}"].num_output == 41 for index in range(8))


def test_first_tokens_come_in_the_order_of_arrival() -> None:
    bench = Bench(seats=3, budget=7, blocks=16)
    lengths = {"a": 20, "b": 1, "c": 9, "d": 3, "e": 17, "f": 2}
    for name, length in lengths.items():
        bench.add(name, length, max_tokens=5)
    bench.run()
    steps = [bench.first_tokens[name] for name in lengths]
    assert steps == sorted(steps)
    assert len(set(steps)) > 3


def test_a_small_prompt_does_not_overtake_a_large_one_that_waits_for_blocks() -> None:
    bench = Bench(blocks=5, block_size=4)
    bench.add("a", 7, max_tokens=2)
    bench.add("large", 12, max_tokens=1)
    bench.add("small", 1, max_tokens=1)
    assert bench.run() == ["a7", "a1", "large8", "small1 large4"], "small joins in the step in which there is room"


def test_when_blocks_run_out_the_last_admitted_give_way_and_come_back_in_their_old_order() -> None:
    bench = Bench(blocks=6, block_size=2, seats=3)
    for name in "abc":
        bench.add(name, 1, max_tokens=7)
    bench.add("d", 1, max_tokens=1)
    trace = bench.steps(4)
    assert trace == ["a1 b1 c1"] * 4
    # Each needs a third block, and none is free: c gives its two to a and b.
    assert bench.steps(2) == ["a1 b1"] * 2
    # A fourth each: b gives way to a, and waits before c, which waits before d.
    assert bench.step() == "a1"
    assert [bench.scheduler.waiting[index] for index in range(3)] == [bench["b"], bench["c"], bench["d"]]
    # They compute their prompt and what they had answered again, and go on from there.
    assert bench.run() == ["b7", "d1 c5", "c1", "c1"]
    assert bench.scheduler.num_preemptions == 2
    assert [bench[name].num_output for name in "abcd"] == [7, 7, 7, 1]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    # vllm#25538: admitted and thrown out again, for ever
    bench = Bench(blocks=6, block_size=2, seats=4)
    for name in "abc":
        bench.add(name, 1, max_tokens=7)
    bench.steps(4)
    bench.add("d", 1, max_tokens=1)
    assert bench.step() == "a1 b1"  # c's second block would have been enough for d


def test_a_prompt_is_preempted_in_the_middle_too() -> None:
    bench = Bench(blocks=6, block_size=2, budget=3)
    a = bench.add("a", 1, max_tokens=8)
    assert bench.step() == "a1"
    b = bench.add("b", 7, max_tokens=1)
    assert bench.steps(2) == ["a1 b2", "a1 b2"]
    assert bench.step() == "a1 b2"
    assert bench.step() == "a1", "a takes its third block"
    assert b.status is Status.WAITING
    assert b.num_computed == 0
    bench.run()
    assert (a.num_output, b.num_output) == (8, 1)


def test_a_newcomer_leaves_a_block_for_everyone_who_runs() -> None:
    bench = Bench(blocks=6, block_size=2)
    bench.add("a", 4)
    bench.step()
    bench.add("b", 7, max_tokens=1)
    assert bench.step() == "a1", "with b's four blocks none would be left for a"


# Where a sequence ends


def test_an_end_of_sequence_token_ends_a_sequence_and_frees_its_blocks() -> None:
    bench = Bench()
    a = bench.add("a", 5)
    bench.step()
    bench.next_token = lambda sequence: EOS
    assert bench.run() == ["a1"]
    assert a.finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("token", "params", "reason", "count"),
    [
        (EOS, {"max_tokens": 1}, FinishReason.STOP, 1),  # an end token wins over the limit it is reached with
        (EOS, {"max_tokens": 3}, FinishReason.STOP, 1),
        (EOS, {"max_tokens": 3, "ignore_eos": True}, FinishReason.LENGTH, 3),
        (EOS, {"max_tokens": 3, "ignore_eos": True, "stop_token_ids": (EOS,)}, FinishReason.STOP, 1),
        (WORD, {"max_tokens": 1}, FinishReason.LENGTH, 1),
        (WORD, {"max_tokens": 3}, FinishReason.LENGTH, 3),
        (WORD, {"max_tokens": 3, "stop_token_ids": (7, WORD)}, FinishReason.STOP, 1),
        (WORD, {"max_tokens": 1, "stop_token_ids": (WORD,)}, FinishReason.STOP, 1),
        (WORD, {"max_tokens": 3, "stop_token_ids": (7,)}, FinishReason.LENGTH, 3),
    ],
)
def test_the_reason_is_the_end_token_or_else_the_limit(
    token: int, params: dict[str, object], reason: FinishReason, count: int
) -> None:
    bench = Bench()
    bench.next_token = lambda sequence: token
    a = bench.add("a", 3, **params)
    bench.run()
    assert (a.finish_reason, a.num_output) == (reason, count)


def test_min_tokens_outlasts_end_tokens() -> None:
    bench = Bench()
    bench.next_token = lambda sequence: EOS
    a = bench.add("a", 3, min_tokens=3, max_tokens=9)
    bench.run()
    assert (a.finish_reason, a.num_output) == (FinishReason.STOP, 3)


def test_the_models_length_ends_a_sequence() -> None:
    bench = Bench(max_model_len=10)
    a = bench.add("a", 7)
    bench.run()
    assert (a.finish_reason, len(a.tokens)) == (FinishReason.LENGTH, 10)


# What can never run


@pytest.mark.parametrize(("limit", "words"), [({"max_model_len": 12}, "model's length"), ({"blocks": 3}, "KV pool")])
def test_a_prompt_is_taken_up_to_the_bound_and_refused_one_past_it(limit: dict[str, int], words: str) -> None:
    # vllm#39734, sglang#28530: what never fits hung the engine
    bench = Bench(**limit)  # type: ignore[arg-type]
    a = bench.add("a", 11)
    with pytest.raises(InvalidRequest, match=rf"12 tokens; allowed: at most 11 \(the {words} is 12"):
        bench.add("b", 12)
    assert bench.run() == ["a8", "a3"]
    assert (a.finish_reason, len(a.tokens)) == (FinishReason.LENGTH, 12)


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        Bench().add("a", 0)


def test_a_refused_prompt_leaves_nothing_behind() -> None:
    bench = Bench(blocks=2)
    with pytest.raises(InvalidRequest):
        bench.add("a", 100)
    assert bench.scheduler.is_idle
    assert bench.scheduler.num_prompt_tokens == 0


def test_a_sequence_alone_may_fill_the_whole_pool() -> None:
    bench = Bench(blocks=3, block_size=4)
    a = bench.add("a", 1)
    while a.status is not Status.FINISHED:
        bench.step()
    assert (a.finish_reason, len(a.tokens)) == (FinishReason.LENGTH, 12)
    assert bench.scheduler.num_preemptions == 0
    bench.check_all_is_free()


def test_two_that_would_each_fill_the_pool_both_get_to_its_end() -> None:
    bench = Bench(blocks=3, block_size=4)
    a, b = bench.add("a", 1), bench.add("b", 1)
    bench.run()
    assert (len(a.tokens), len(b.tokens)) == (12, 12)
    assert bench.scheduler.num_preemptions > 0


# Abort at every point of a request's life


def queued(bench: Bench) -> None:
    bench.add("other", 2, max_tokens=3)
    bench.step()
    bench.add("x", 3)


def never_scheduled(bench: Bench) -> None:
    bench.add("x", 3)  # vllm#18485: this alone leaked


def in_the_middle_of_its_prompt(bench: Bench) -> None:
    bench.add("x", 20)
    assert bench.step() == "x8"


def decoding(bench: Bench) -> None:
    bench.add("x", 3)
    bench.steps(3)


def preempted(bench: Bench) -> None:
    bench.add("other", 1, max_tokens=60)
    bench.add("x", 1)
    while bench["x"].num_output == 0 or bench["x"].status is Status.RUNNING:
        bench.step()


def preempted_and_back(bench: Bench) -> None:
    bench.add("other", 1, max_tokens=40)
    bench.add("x", 1)
    while not bench.scheduler.num_preemptions or bench["x"].status is not Status.RUNNING:
        bench.step()


def finished(bench: Bench) -> None:
    bench.add("x", 3, max_tokens=2)
    bench.steps(2)


LIFE = [queued, never_scheduled, in_the_middle_of_its_prompt, decoding, preempted, preempted_and_back, finished]


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("moment", LIFE)
def test_an_abort_frees_everything_and_harms_nobody(moment: Callable[[Bench], None], prefix_caching: bool) -> None:
    bench = Bench(blocks=16, block_size=4, seats=1 if moment is queued else 4, prefix_caching=prefix_caching)
    moment(bench)
    x = bench["x"]
    reason = x.finish_reason or FinishReason.ABORT
    tokens = list(x.tokens)
    for _ in range(2):  # twice is harmless
        bench.abort("x")
        assert (x.status, x.finish_reason, x.blocks) == (Status.FINISHED, reason, [])
    bench.pool.check_integrity()
    assert not any(line.startswith("x") or " x" in line for line in bench.run())
    assert x.tokens == tokens
    if "other" in bench.sequences:
        assert bench["other"].finish_reason is FinishReason.LENGTH


def test_a_sequence_aborted_while_its_last_step_runs_gets_nothing_of_it() -> None:
    # vllm#26400: a cancel in the final step was ignored
    bench = Bench()
    x = bench.add("x", 3, max_tokens=1)
    other = bench.add("other", 3, max_tokens=1)
    assert bench.step(meanwhile=lambda: bench.abort("x")) == "x3 other3"
    assert (x.finish_reason, x.num_output) == (FinishReason.ABORT, 0)
    assert other.finish_reason is FinishReason.LENGTH
    bench.check_all_is_free()


def test_a_sequence_that_was_never_added_can_not_be_ended() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="not in list"):
        bench.scheduler.end(request([1]), FinishReason.ABORT)


# Prefixes


def test_a_second_prompt_computes_only_what_differs() -> None:
    bench = Bench(prefix_caching=True, block_size=4)
    bench.add("a", [*range(100, 109)], max_tokens=1)
    bench.run()
    bench.add("b", [*range(100, 108), 7, 8, 9], max_tokens=1)
    assert bench.run() == ["b3"]
    assert bench.scheduler.num_cached_tokens == 8
    assert bench.scheduler.num_prompt_tokens == 20


def test_without_prefix_caching_everything_is_computed() -> None:
    bench = Bench(prefix_caching=False, budget=64)
    for name in "ab":
        bench.add(name, range(100, 109), max_tokens=1)
        assert bench.run() == [f"{name}9"]
    assert bench.scheduler.num_cached_tokens == 0


@pytest.mark.parametrize(("length", "computed"), [(4, 4), (5, 1), (7, 3), (8, 4), (9, 1), (12, 4)])
def test_a_prompt_known_in_full_still_computes_its_last_token(length: int, computed: int) -> None:
    # vllm#30320: with everything cached nothing was left to sample from
    bench = Bench(prefix_caching=True, block_size=4, budget=64)
    for name in "ab":
        bench.add(name, range(100, 100 + length), max_tokens=2)
        trace = bench.run()
    assert trace == [f"b{computed}", "b1"]


def test_a_prefix_is_shared_while_its_owner_runs_and_outlives_it() -> None:
    bench = Bench(prefix_caching=True, block_size=4, budget=64)
    a = bench.add("a", range(100, 109))
    bench.step()
    b = bench.add("b", range(100, 109))
    assert bench.step() == "a1 b1"
    assert a.blocks[:2] == b.blocks[:2]
    assert a.blocks[2] != b.blocks[2]
    bench.abort("a")
    assert bench.steps(3) == ["b1"] * 3  # the bench sees to it that b still finds its text
    bench.abort("b")
    bench.check_all_is_free()


def test_answers_are_prefixes_as_well() -> None:
    bench = Bench(prefix_caching=True, block_size=4)
    a = bench.add("a", range(100, 104), max_tokens=6)
    bench.run()
    bench.add("b", [*a.tokens, 55], max_tokens=1)
    assert bench.run() == ["b3"]


def test_a_prefix_is_known_chunk_by_chunk() -> None:
    bench = Bench(prefix_caching=True, block_size=4, budget=8, seats=4)
    bench.add("a", range(100, 120), max_tokens=1)
    bench.step()
    bench.add("b", range(100, 120), max_tokens=1)
    # a's first chunk is two blocks, which b finds while a still computes
    assert bench.step() == "a8"
    assert bench.step() == "a4 b4"
    assert bench.scheduler.num_cached_tokens == 16


def test_a_preempted_sequence_finds_its_own_blocks_again() -> None:
    bench = Bench(prefix_caching=True, blocks=6, block_size=2, seats=2)
    bench.add("a", 1, max_tokens=7)
    bench.add("b", 1, max_tokens=9)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.num_cached_tokens > 0


def test_a_preempted_sequence_whose_blocks_were_given_away_is_a_prefix_again() -> None:
    bench = Bench(prefix_caching=True, blocks=6, block_size=2, seats=2)
    bench.add("a", 1, max_tokens=11)
    b = bench.add("b", 4, max_tokens=9)
    while b.status is not Status.FINISHED:
        bench.step()
    assert bench.scheduler.num_preemptions > 0
    assert bench.scheduler.num_cached_tokens == 0, "a took all blocks that b had"
    bench.add("c", [*b.tokens[:8], 7], max_tokens=1)
    assert bench.run() == ["c1"]


def test_what_a_failed_sequence_computed_is_no_prefix_for_others() -> None:
    # Else one NaN in a prompt that all share would fail every request from then on.
    bench = Bench(prefix_caching=True, block_size=4, budget=64)
    bench.add("a", range(100, 109))
    bench.step()
    bench.add("b", range(100, 109), max_tokens=3)
    assert bench.step() == "a1 b1"
    bench.scheduler.end(bench["a"], FinishReason.ERROR)
    bench.pool.check_integrity()
    bench.add("c", range(100, 109), max_tokens=1)
    assert bench.run() == ["b1 c9", "b1"], "b goes on with what it holds"


def test_failed_admissions_count_no_cached_tokens() -> None:
    # vllm#18957: counted anew at every attempt
    bench = Bench(prefix_caching=True, blocks=6, block_size=4, seats=2, budget=64)
    bench.add("a", range(100, 109), max_tokens=4)
    bench.step()
    bench.add("b", range(100, 118), max_tokens=1)
    bench.run()
    assert bench.scheduler.num_cached_tokens == 8


def test_lower_priorities_are_seated_first_and_equals_as_they_came() -> None:
    bench = Bench(seats=1)
    bench.add("first", 3, max_tokens=1)
    assert bench.step() == "first3"
    for name, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)):
        bench.add(name, 3, max_tokens=1, priority=priority)
    assert [bench.step() for _ in range(5)] == ["c3", "e3", "a3", "d3", "b3"]
    bench.check_all_is_free()


def test_the_last_in_priority_gives_way_and_returns_before_those_after_it() -> None:
    bench = Bench(seats=3, blocks=6)
    bench.add("low", 7, priority=1)
    bench.step()
    bench.add("high", 7)
    bench.step()
    bench.add("later", 7, priority=1)
    while bench.scheduler.num_preemptions == 0:
        bench.step()
    assert [sequence is bench["low"] for sequence in bench.scheduler.waiting] == [True, False]
    assert bench.scheduler.running == [bench["high"]]
    for name in ("high", "low", "later"):
        bench.abort(name)
    bench.check_all_is_free()


def test_answers_to_one_prompt_compute_it_once() -> None:
    bench = Bench(seats=4, budget=6, block_size=4, prefix_caching=True)
    leader = bench.add("a", 10, max_tokens=2)
    for name in ("b", "c"):
        follower = bench.add(name, leader.prompt, max_tokens=2)
        follower.leader = leader
    bench.add("other", 2, max_tokens=1)
    # Two chunks for the leader, beside which others go on; then the followers compute what is behind the full blocks.
    assert [bench.step() for _ in range(3)] == ["a6", "a4 other2", "a1 b2 c2"]
    assert bench["b"].blocks[:2] == bench["c"].blocks[:2]
    assert bench["b"].blocks[2:] != bench["c"].blocks[2:]
    bench.run()
    bench.check_all_is_free()


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_leader_that_ends_early_keeps_nobody_waiting(prefix_caching: bool) -> None:
    bench = Bench(budget=4, prefix_caching=prefix_caching)
    leader = bench.add("a", 10, max_tokens=2)
    bench.add("b", leader.prompt, max_tokens=1).leader = leader
    assert bench.step() == "a4"
    bench.abort("a")
    bench.run()
    assert bench["b"].finish_reason is FinishReason.LENGTH
    bench.check_all_is_free()
