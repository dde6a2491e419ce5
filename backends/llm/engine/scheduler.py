"""Which tokens the next step computes. Pure Python: never sees a tensor.

Every sequence's `num_computed` catches up with its tokens under one token budget: decodes first, so that a long prompt
never makes them miss a step, then prompts in chunks, first come first served within a priority.
"""

import bisect
from dataclasses import dataclass
from typing import NamedTuple

from engine.block_pool import BlockPool
from engine.errors import InvalidRequest
from engine.sequence import FinishReason, Sequence, Status, finish_reason


class Scheduled(NamedTuple):
    sequence: Sequence
    num_tokens: int  # computed in this step, from sequence.num_computed on

    @property
    def samples(self) -> bool:
        """Whether this step computes its last known token, so that the next one can be sampled."""
        return self.num_tokens == self.sequence.num_uncomputed


class Step(NamedTuple):
    """What one pass over the weights computes; one-token entries come first."""

    scheduled: list[Scheduled]

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.scheduled)


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_caching: bool = True


class Scheduler:
    def __init__(self, pool: BlockPool, limits: Limits, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.pool = pool
        self.limits = limits
        self.eos_token_ids = eos_token_ids
        # One sequence alone must always fit, or it would wait for ever.
        self.max_len = min(limits.max_model_len, pool.num_blocks * pool.block_size)
        self.waiting: list[Sequence] = []  # by rank: the next one first
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self._arrivals = 0
        self._seats = limits.max_num_seqs
        self._budget = limits.max_num_batched_tokens
        self.num_prompt_tokens = 0  # prompts taken in
        self.num_cached_tokens = 0  # tokens found in the prefix cache instead of computed

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def check(self, num_prompt_tokens: int) -> None:
        """Raises InvalidRequest when a prompt could never run."""
        if num_prompt_tokens == 0:
            raise InvalidRequest("the prompt has no tokens; allowed: at least 1")
        if num_prompt_tokens >= self.max_len:
            pool = self.pool.num_blocks * self.pool.block_size
            limit = "the model's length" if self.limits.max_model_len <= pool else "the KV pool"
            allowed = f"at most {self.max_len - 1} ({limit} is {self.max_len}, and one is generated)"
            raise InvalidRequest(f"the prompt has {num_prompt_tokens} tokens; allowed: {allowed}")

    def add(self, sequence: Sequence) -> None:
        self.check(len(sequence.prompt))
        self.num_prompt_tokens += len(sequence.prompt)
        self._arrivals += 1
        sequence.rank = (sequence.params.priority, self._arrivals)
        bisect.insort(self.waiting, sequence, key=_rank)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """Take a sequence out, wherever it is. Harmless on one that has ended."""
        if sequence.status is Status.FINISHED:
            return
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            if reason is FinishReason.ERROR:  # what made it fail may be in its blocks
                self.pool.forget(sequence.blocks)
            self.pool.release(sequence.forget_blocks())
        else:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def schedule(self) -> Step:
        budget = self._budget
        decodes = self._decodes()
        budget -= len(decodes)
        prefills = []
        for sequence in self.running:
            if budget and not sequence.is_decoding:
                prefills.append(Scheduled(sequence, min(sequence.num_uncomputed, budget)))
                budget -= prefills[-1].num_tokens
        while budget and (newcomer := self._admit()):
            prefills.append(Scheduled(newcomer, min(newcomer.num_uncomputed, budget)))
            budget -= prefills[-1].num_tokens
        prefills.sort(key=lambda entry: entry.num_tokens > 1)  # stable: one-token entries first
        return Step(decodes + prefills)

    def _decodes(self) -> list[Scheduled]:
        """One token for every decoding sequence; when blocks run out those of the last rank are preempted."""
        decodes = []
        # By rank, so that whoever is preempted comes later, or is the one at hand, and has no token in this step yet.
        for sequence in sorted(self.running, key=_rank):
            if sequence.status is Status.RUNNING and sequence.is_decoding and self._grow(sequence):
                decodes.append(Scheduled(sequence, 1))
        return decodes

    def _grow(self, sequence: Sequence) -> bool:
        """Room for one more token. False when the sequence itself had to give way."""
        if self.pool.blocks_for(len(sequence.tokens)) == len(sequence.blocks):
            return True
        while not self.pool.num_free:
            victim = max(self.running, key=_rank)
            self._preempt(victim)
            if victim is sequence:
                return False
        sequence.blocks += self.pool.allocate(1)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Back to its place in the queue; its tokens, output included, are computed again when it returns."""
        self.running.remove(sequence)
        self.pool.release(sequence.forget_blocks())
        sequence.status = Status.WAITING
        bisect.insort(self.waiting, sequence, key=_rank)
        self.num_preemptions += 1

    def _admit(self) -> Sequence | None:
        """Seat the first in the queue with blocks for all its tokens, so that no prompt is stuck half-way."""
        if not self.waiting or len(self.running) >= self._seats:
            return None
        sequence = next((each for each in self.waiting if not self._waits_for_leader(each)), None)
        if sequence is None:
            return None
        cached = self.pool.match(sequence.tokens) if self.limits.prefix_caching else []
        revived = sum(self.pool.is_free(block) for block in cached)
        wanted = self.pool.blocks_for(len(sequence.tokens)) - len(cached)
        # One block to spare for every running sequence: each may need one soon, and would throw the newcomer out.
        if wanted + revived + len(self.running) > self.pool.num_free:
            return None
        self.waiting.remove(sequence)
        self.pool.hold(cached)
        sequence.blocks = cached + self.pool.allocate(wanted)
        sequence.num_computed = len(cached) * self.pool.block_size
        sequence.num_registered = len(cached)
        if cached:
            sequence.prefix_number = self.pool.number_of(cached[-1])
            self.num_cached_tokens += sequence.num_computed
        sequence.status = Status.RUNNING
        self.running.append(sequence)
        return sequence

    def shrink(self, step: Step) -> bool:
        """After a step that ran out of memory: half of it from now on, until all is done. False when that is nothing.

        Nothing of the step counts as computed. Those of the last rank give way.
        """
        if step.num_tokens < 2:
            return False
        self._budget = step.num_tokens // 2
        self._seats = min(self._seats, self._budget)
        while len(self.running) > self._seats:
            self._preempt(max(self.running, key=_rank))
        return True

    def grow_back(self) -> None:
        self._seats, self._budget = self.limits.max_num_seqs, self.limits.max_num_batched_tokens

    def _waits_for_leader(self, sequence: Sequence) -> bool:
        """Whether another answer computes the same prompt right now: its full blocks can be shared when it is done."""
        leader = sequence.leader
        return (
            self.limits.prefix_caching
            and leader is not None
            and leader.status is Status.RUNNING
            and leader.num_computed < len(leader.prompt)
        )

    def finish(self, step: Step, sampled: dict[Sequence, int]) -> list[Sequence]:
        """Take in what a step computed. Returns the sequences that got a token; those that end with it have ended."""
        updated = []
        for sequence, num_tokens in step.scheduled:
            if sequence.status is not Status.RUNNING:  # ended while the step ran
                continue
            sequence.num_computed += num_tokens
            if self.limits.prefix_caching:
                self._register(sequence)
            if sequence in sampled:
                sequence.tokens.append(sampled[sequence])
                updated.append(sequence)
                reason = finish_reason(sequence, self.eos_token_ids, self.max_len)
                if reason:
                    self.end(sequence, reason)
        return updated

    def _register(self, sequence: Sequence) -> None:
        size = self.pool.block_size
        for index in range(sequence.num_registered, sequence.num_computed // size):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            number = self.pool.register(sequence.blocks[index], sequence.prefix_number, tokens)
            sequence.prefix_number = number
            sequence.num_registered = index + 1


def _rank(sequence: Sequence) -> tuple[int, int]:
    return sequence.rank
