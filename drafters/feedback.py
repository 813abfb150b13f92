"""Records of one finished query, from which a drafter can learn.
Legend: rows = sequences of the engine's table, positions = committed ones, width = taps * hidden, top = likeliest
tokens of the target that are kept, labels = positions for which the drafter had a state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

NOWHERE = -1
"""Position of a label that is padding."""
_BLOCK = 32  # scores per block in the search for the highest


@dataclass(frozen=True, slots=True)
class DraftLabels:
    """Positions for which a block had a state, in the order of the sequence."""

    positions: Tensor  # [labels] int64, in the query's tokens
    states: Tensor  # [labels, hidden], what the drafter's heads read there
    tokens: Tensor  # [labels] int64, the target's choice
    chances: Tensor  # [labels] float32, the drafter's probability of that token (r); 0 if it cannot propose it
    rejected: Tensor  # [labels] bool, no node of the tree had the token
    top_ids: Tensor  # [labels, top] int32
    top_logprobs: Tensor  # [labels, top] float16

    def take(self, picked: Tensor) -> "DraftLabels":
        """Return a selection. # picked [labels] bool or [picked] int64"""
        return DraftLabels(*(value[picked] for value in self.fields))

    def to(self, device: torch.device | str) -> "DraftLabels":
        """Return a copy on a device."""
        return DraftLabels(*(value.to(device) for value in self.fields))

    @property
    def fields(self) -> tuple[Tensor, ...]:
        """All tensors, [labels, ...] each."""
        return tuple(getattr(self, name) for name in self.__slots__)

    @property
    def count(self) -> int:
        """Number of labels."""
        return self.positions.shape[0]

    @property
    def num_rejected(self) -> int:
        """Number of rejected labels; waits for the device."""
        return int(self.rejected.sum())  # planned transfer: after the sequence has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query at its end, as the engine reports it."""

    row: int
    tokens: Sequence[int]  # prompt and answer
    num_prompt: int  # prompt tokens
    client: str
    store: bool  # False: must not be learnt from
    temperature: float
    seed: int  # seed of its sampling noise, signed 64 bits
    first_version: int  # version of the drafter in its first step
    version: int  # version of the drafter in its last step
    accepted: tuple[int, ...]  # accepted length of each verify with at least one drafted node
    plain_steps: int  # decoding steps without drafted nodes
    seconds: float  # its share of its steps' seconds, without reading prompts; all queries add up to decoding time
    offset: int = 0  # absolute position of the first of `tokens`, if earlier ones are left out

    @property
    def answer(self) -> Sequence[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt :]

    @property
    def num_steps(self) -> int:
        """Decoding steps."""
        return len(self.accepted) + self.plain_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFeedback:
    """Training data recorded from one finished query. Labels and features reach from the end of the answer as far back
    as the window; they are empty if the query was not recorded."""

    query: Query
    prompt: int  # position of the first label, where the answer or the kept part of it begins
    first: int  # position of the first features
    features: Tensor  # [length - 1 - first, taps * hidden]; the last token was never run
    top_ids: Tensor  # [length - prompt, top] int32, by position from `prompt` on
    top_logprobs: Tensor  # [length - prompt, top] float16
    draft_labels: DraftLabels
    ready: torch.cuda.Event | None  # reached when another stream may read the tensors; None: at once

    @property
    def recorded(self) -> bool:
        """Whether there is anything to learn from."""
        return self.prompt < len(self.query.tokens)


def target_tops(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities of the likeliest tokens, likeliest first. # scores [positions, vocab], any float
    -> two [positions, top]"""
    scores = scores.to(torch.float32, copy=True)
    best, ids = likeliest(scores, top)
    highest = best[:, :1]
    # Half the time of `log_softmax`, which writes values that are not kept and converts bf16 one by one.
    return ids, (best - highest - scores.sub_(highest).exp_().sum(-1, keepdim=True).log_())


def likeliest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores of each row, highest first, and their indices. Only the `top` blocks with the highest
    maxima are searched, which hold them all: half the time. # scores [positions, vocab] -> two [positions, top]"""
    if scores.shape[1] < 2 * top * _BLOCK:
        found = scores.topk(top, dim=-1)
        return found.values, found.indices
    missing = -scores.shape[1] % _BLOCK
    blocks = (pad(scores, (0, missing), value=-torch.inf) if missing else scores).unflatten(1, (-1, _BLOCK))
    best = blocks.amax(-1).topk(top, dim=-1, sorted=False).indices  # [positions, top]
    row = torch.arange(scores.shape[0], device=scores.device)[:, None]
    within = blocks[row, best].flatten(1).topk(top, dim=-1)
    place = best.gather(1, within.indices // _BLOCK) * _BLOCK + within.indices % _BLOCK
    return within.values, place
