"""Training records of one finished query, and the target's likeliest tokens in them.
Legend: rows = sequences of the engine's table, positions = committed ones, width = taps * hidden, top = number
of the target's likeliest tokens that are kept, labels = positions for which the drafter had a state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

NOWHERE = -1
"""Position of a label that is padding."""
_BLOCK = 32  # logits per block in `likeliest`


@dataclass(frozen=True, slots=True)
class DraftLabels:
    """Labels to train output layers on: positions for which a drafted block had a state, in sequence order."""

    positions: Tensor  # [labels] int64, in the query's tokens
    states: Tensor  # [labels, hidden], the input of the drafter's heads at each position
    tokens: Tensor  # [labels] int64, the token that the target chose
    chances: Tensor  # [labels] float32, the drafter's probability of that token (r); 0 if it cannot propose it
    rejected: Tensor  # [labels] bool, the tree had nodes, but none with this token here
    top_ids: Tensor  # [labels, top] int32
    top_logprobs: Tensor  # [labels, top] float16

    def take(self, picked: Tensor) -> "DraftLabels":
        """Return the selected labels. # picked [labels] bool or [picked] int64"""
        return DraftLabels(*(value[picked] for value in self.fields))

    def to(self, device: torch.device | str) -> "DraftLabels":
        """Return these labels on a device."""
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
    """A finished query, as the engine reports it."""

    row: int
    tokens: Sequence[int]  # prompt and answer
    num_prompt: int  # prompt tokens
    client: str
    store: bool  # False: nothing may be learned from it
    temperature: float
    seed: int  # seed of its sampling noise, signed 64 bits
    first_version: int  # version of the drafter in its first step
    version: int  # version of the drafter in its last step
    accepted: tuple[int, ...]  # accepted length of each step with at least one drafted node
    plain_steps: int  # decoding steps without drafted nodes
    seconds: float  # its share of the seconds of its decoding steps, prompts excluded; all queries sum to decoding time
    offset: int = 0  # absolute position of the first of `tokens`, if earlier ones are left out

    @property
    def answer(self) -> Sequence[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt :]

    @property
    def num_steps(self) -> int:
        """Number of decoding steps."""
        return len(self.accepted) + self.plain_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFeedback:
    """Training data recorded from one finished query: features and labels of its last positions, at most the recording
    window. They are empty if the query was not recorded."""

    query: Query
    prompt: int  # position of the first label: start of the answer, or of its part within the window
    first: int  # position of the first features
    features: Tensor  # [length - 1 - first, taps * hidden]; the target never ran the last token
    top_ids: Tensor  # [length - prompt, top] int32, by position from `prompt` on
    top_logprobs: Tensor  # [length - prompt, top] float16
    draft_labels: DraftLabels
    ready: torch.cuda.Event | None  # other streams may read the tensors after it; None: at any time

    @property
    def recorded(self) -> bool:
        """Whether the query was recorded, so that there are labels."""
        return self.prompt < len(self.query.tokens)


def target_tops(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return ids and log-probabilities of the `top` likeliest tokens, likeliest first. # scores [positions, vocab],
    logits of any float type -> two [positions, top]"""
    scores = scores.to(torch.float32, copy=True)
    best, ids = likeliest(scores, top)
    highest = best[:, :1]
    # Takes half the time of `log_softmax`, which also writes the values that are not kept.
    return ids, (best - highest - scores.sub_(highest).exp_().sum(-1, keepdim=True).log_())


def likeliest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the `top` highest scores of each row, highest first, and their indices. It searches only the `top` blocks
    with the highest maxima, which contain them all, in half the time. # scores [positions, vocab] -> two [positions,
    top]"""
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
