"""The scheduler without a model: scripted tokens, and a KV cache that remembers what was written where."""

from collections.abc import Callable, Iterable

from engine.block_pool import BlockPool
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler, Step
from engine.sequence import FinishReason, Sequence, Status

EOS = 0
WORD = 1  # what a sequence without a script goes on with


def request(prompt: Iterable[int], **params: object) -> Sequence:
    """A greedy request that runs for ever unless told otherwise."""
    return Sequence(list(prompt), SamplingParams(**{"temperature": 0.0, "max_tokens": 10**6, **params}), seed=0)  # type: ignore[arg-type]


class Bench:
    """A scheduler driven by hand.

    Every step is checked for what must always hold, and its attention is played through: each slot of the KV cache
    holds the text that its K and V depend on, and every sequence must find its own text, whole, in its blocks.
    """

    def __init__(
        self,
        *,
        seats: int = 4,
        budget: int = 8,
        blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 10**6,
        prefix_caching: bool = False,
    ) -> None:
        self.pool = BlockPool(blocks, block_size)
        limits = Limits(seats, budget, max_model_len, prefix_caching)
        self.scheduler = Scheduler(self.pool, limits, frozenset([EOS]))
        self.sequences: dict[str, Sequence] = {}
        self.next_token: Callable[[Sequence], int] = lambda sequence: WORD
        self.first_tokens: dict[str, int] = {}  # the step in which each got its first
        self.num_steps = 0
        self._names: dict[Sequence, str] = {}
        self._cache: dict[int, int] = {}  # slot -> hash of the text up to there
        self._texts: dict[Sequence, list[int]] = {}  # hash of each of its prefixes

    def add(self, name: str, prompt: int | Iterable[int], **params: object) -> Sequence:
        """With a number for a prompt: so many tokens that no other prompt begins with."""
        if isinstance(prompt, int):
            first = 1000 * (len(self.sequences) + 1)
            prompt = range(first, first + prompt)
        sequence = request(prompt, **params)
        self.scheduler.add(sequence)
        self.sequences[name] = sequence
        self._names[sequence] = name
        return sequence

    def __getitem__(self, name: str) -> Sequence:
        return self.sequences[name]

    def abort(self, name: str) -> None:
        self.scheduler.end(self.sequences[name], FinishReason.ABORT)

    def forget(self, name: str) -> None:
        """Keep a long run's memory flat."""
        sequence = self.sequences.pop(name)
        del self._names[sequence]
        self._texts.pop(sequence, None)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> str:
        """One step, as `"a1 b1 c6"`: names and numbers of tokens. `meanwhile`: done while it runs."""
        decoding = [sequence for sequence in self.scheduler.running if sequence.is_decoding]
        step = self.scheduler.schedule()
        self._check(step, decoding)
        self._attend(step)
        sampled = {entry.sequence: self.next_token(entry.sequence) for entry in step.scheduled if entry.samples}
        line = " ".join(f"{self._names[entry.sequence]}{entry.num_tokens}" for entry in step.scheduled)
        meanwhile()
        for sequence in self.scheduler.finish(step, sampled):
            self.first_tokens.setdefault(self._names[sequence], self.num_steps)
        self.num_steps += 1
        return line

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def run(self) -> list[str]:
        """Until nothing is left; then nothing may be held."""
        lines = []
        while not self.scheduler.is_idle:
            lines.append(self.step())
        self.check_all_is_free()
        return lines

    def check_all_is_free(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_used == 0

    def _check(self, step: Step, decoding: list[Sequence]) -> None:
        limits, running = self.scheduler.limits, self.scheduler.running
        assert step.scheduled, "a step without work would spin for ever"
        assert step.num_tokens <= limits.max_num_batched_tokens
        assert len(running) <= limits.max_num_seqs
        scheduled = {entry.sequence: entry for entry in step.scheduled}
        assert len(scheduled) == len(step.scheduled), "a sequence stands twice in one step"
        for sequence in decoding:
            assert sequence in scheduled or sequence.status is Status.WAITING, "a decode missed a step"
        counts = [entry.num_tokens for entry in step.scheduled]
        assert min(counts) >= 1
        assert counts == sorted(counts, key=lambda count: count > 1), "one-token entries come first"
        assert self.pool.num_used == len({block for sequence in running for block in sequence.blocks})

    def _attend(self, step: Step) -> None:
        size = self.pool.block_size
        for sequence, num_tokens in step.scheduled:
            texts = self._texts.setdefault(sequence, [])
            for token in sequence.tokens[len(texts) :]:
                texts.append(hash((texts[-1] if texts else 0, token)))
            slots = [block * size + offset for block in sequence.blocks for offset in range(size)]
            first, end = sequence.num_computed, sequence.num_computed + num_tokens
            for position in range(first, end):
                self._cache[slots[position]] = texts[position]
            assert [self._cache.get(slot) for slot in slots[:end]] == texts[:end], "another text's K and V"
