"""One request's state: a list of tokens, and how many of them the model has seen."""

import enum
import time
from dataclasses import dataclass, field

from engine.block_pool import ROOT
from engine.sampling_params import SamplingParams
from engine.structured import Guide


class Status(enum.Enum):
    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.StrEnum):
    """vLLM's words: `stop` is an end-of-sequence token, a stop token or a stop string; `length` any limit."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True)
class Times:
    """By time.perf_counter()."""

    arrived: float = field(default_factory=time.perf_counter)
    seated: float | None = None  # in its first step
    first_token: float = 0.0
    last_token: float | None = None


@dataclass(eq=False, slots=True)
class Sequence:
    """There is no prefill phase: a sequence is done with its prompt when `num_computed` reaches `len(tokens) - 1`."""

    prompt: list[int]
    params: SamplingParams
    seed: int
    banned: tuple[tuple[int, ...], ...] = ()  # bad words as tokens
    guide: Guide | None = None
    leader: "Sequence | None" = None  # another answer to the same prompt, whose blocks this one waits to share
    tokens: list[int] = field(init=False)  # prompt and output
    num_computed: int = 0  # tokens whose K and V are in its blocks
    blocks: list[int] = field(default_factory=list)
    num_registered: int = 0  # leading blocks that the prefix cache knows
    prefix_number: int = ROOT  # the number under which it knows the last of them
    rank: tuple[int, int] = (0, 0)  # priority, number of arrival: lower ones go first
    times: Times = field(default_factory=Times)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        return self.num_uncomputed == 1 and self.num_output > 0

    def forget_blocks(self) -> list[int]:
        """Its blocks, which it no longer holds: all tokens are to be computed again."""
        blocks, self.blocks = self.blocks, []
        self.num_computed = self.num_registered = 0
        self.prefix_number = ROOT
        return blocks


def finish_reason(sequence: Sequence, eos_token_ids: frozenset[int], max_len: int) -> FinishReason | None:
    """Why the sequence ends with its last token, or None. An end token wins over a limit reached with it."""
    params, token = sequence.params, sequence.tokens[-1]
    if sequence.num_output >= params.min_tokens:
        if token in eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if token in params.stop_token_ids:
            return FinishReason.STOP
    if sequence.guide and sequence.guide.complete:
        return FinishReason.STOP
    if sequence.num_output >= params.max_tokens or len(sequence.tokens) >= max_len:
        return FinishReason.LENGTH
    return None
