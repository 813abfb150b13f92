"""What a drafter can learn from one finished query, and the tables it is collected in while the query runs.

Tables are written at the slot of a position, so that what several steps made permanent costs a few scatters whatever
was accepted, and the newest positions overwrite the oldest.
Legend: rows = sequences of the engine's table, positions = those that steps made permanent, taps * hidden = width,
top = likeliest tokens of the target that are kept, labels = positions of which the drafter said something.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.protocol import DraftContext, Read
from drafters.readback import reached
from drafters.tree import MAX_DEPTH

_BEHIND = MAX_DEPTH + 1  # positions a step may commit behind the end of an answer
_NOWHERE = -1
_BLOCK = 32  # scores whose maximum is looked at first


@dataclass(frozen=True, slots=True)
class TargetTops:
    """The target's likeliest tokens behind each position."""

    ids: Tensor  # [positions, top] int64
    logprobs: Tensor  # [positions, top] float32, unprocessed


@dataclass(frozen=True, slots=True)
class DraftLabels:
    """Positions for which a block had a state, in the order of the text."""

    positions: Tensor  # [labels] int64, absolute
    states: Tensor  # [labels, hidden], what the drafter's heads read there
    tokens: Tensor  # [labels] int64, the target's own
    chances: Tensor  # [labels] float32, the drafter's probability of them (r); 0 for those it cannot propose
    rejected: Tensor  # [labels] bool, the target chose what the tree did not hold
    top_ids: Tensor  # [labels, top] int32
    top_logprobs: Tensor  # [labels, top] float16

    def take(self, lines: Tensor) -> "DraftLabels":
        """Some of them. # lines [labels] bool or [picked] int64"""
        return DraftLabels(*(getattr(self, name)[lines] for name in self.__slots__))

    def to(self, device: torch.device | str) -> "DraftLabels":
        return DraftLabels(*(getattr(self, name).to(device) for name in self.__slots__))

    @property
    def count(self) -> int:
        return self.positions.shape[0]

    @property
    def num_rejected(self) -> int:
        return int(self.rejected.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What the engine knows of a query at its end."""

    row: int
    tokens: Sequence[int]  # prompt and answer
    num_prompt: int  # how many of them, at their beginning, are the prompt
    client: str
    store: bool  # False: must not be learnt from
    temperature: float
    first_version: int  # drafter that served its first step
    version: int  # and its last
    accepted: tuple[int, ...]  # accepted length of each verify with at least one drafted node
    plain_steps: int  # steps without one
    draft_cost: float  # seconds, each step's divided by what the cost table predicts for its load
    verify_cost: float
    seconds: float  # its share of the same steps as they were measured: what all queries' add up to is time

    @property
    def answer(self) -> Sequence[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_steps(self) -> int:
        return len(self.accepted) + self.plain_steps

    @property
    def accepted_by_step(self) -> tuple[int, ...]:
        """Of all steps, in no order: of one without drafts nothing is accepted."""
        return self.accepted + (0,) * self.plain_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryFeedback:
    """One finished query. Labels and features reach from the end of the answer as far back as was kept: not at all
    where the query was not recorded."""

    query: Query
    prompt: int  # position of the first label: behind it stands the answer, or what of it was kept
    first: int  # position of the first features
    features: Tensor  # [length - 1 - first, taps * hidden]; the last token was never run
    top_ids: Tensor  # [length - prompt, top] int32, by position from `prompt` on
    top_logprobs: Tensor  # [length - prompt, top] float16
    draft_labels: DraftLabels
    ready: torch.cuda.Event | None  # when the tensors may be read by another stream; None: at once

    @property
    def recorded(self) -> bool:
        return self.prompt < len(self.query.tokens)

    @property
    def emitted_tokens(self) -> int:
        return sum(self.query.accepted) + self.query.num_steps


class Permanent(NamedTuple):
    """What steps made permanent, position by position, in any order: root and accepted nodes, and what came of them."""

    rows: Tensor  # [positions] int64
    roots: Tensor  # [positions] int64, absolute; the token stands one further
    features: Tensor  # [positions, taps * hidden]
    tokens: Tensor  # [positions] int64, the target's own
    rejected: Tensor  # [positions] bool, the tree had nodes there, and none was right


class Predicted(NamedTuple):
    """What the drafter's blocks had said of the same positions."""

    known: Tensor  # [positions] bool, some block had a state for the position
    states: Tensor  # [positions, hidden]
    chances: Tensor  # [positions] float32


class FeedbackRecorder:
    """Collects the feedback of running sequences. All calls come from the engine thread."""

    def __init__(
        self,
        *,
        max_sequences: int,
        window_tokens: int,
        width: int,
        hidden: int,
        top: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.dtype = dtype
        self._window = window_tokens
        self._places = window_tokens + _BEHIND
        table = (max_sequences, self._places)
        self._features = torch.zeros(*table, width, dtype=dtype, device=device)
        self._top_ids = torch.zeros(*table, top, dtype=torch.int32, device=device)
        self._top_logprobs = torch.zeros(*table, top, dtype=torch.float16, device=device)
        self._marked = torch.full(table, _NOWHERE, dtype=torch.int64, device=device)  # absolute position of the label
        self._states = torch.zeros(*table, hidden, dtype=dtype, device=device)
        self._tokens = torch.full(table, -1, dtype=torch.int64, device=device)
        self._chances = torch.zeros(table, device=device)
        self._rejected = torch.zeros(table, dtype=torch.bool, device=device)
        self._first: dict[int, int] = {}
        self._prompt: dict[int, int] = {}

    @torch.inference_mode()
    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin these sequences; what one had generated before it was preempted counts as its prompt."""
        for context in contexts:
            self._prompt[context.row] = len(context.tokens)
            self._first[context.row] = len(context.tokens) - 1
            self._marked[context.row] = _NOWHERE

    def forget(self, rows: Sequence[int]) -> None:
        """Nothing is kept of the sequences that have these rows now."""
        for row in rows:
            self._prompt.pop(row, None)
            self._first.pop(row, None)

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        """Keep the features of a piece of a prompt, as far as they fit."""
        self._first[read.row] = min(self._first[read.row], read.start)
        count = min(read.features.shape[0], self._window)
        start = read.start + read.features.shape[0] - count
        places = (start + torch.arange(count, device=self._marked.device)) % self._places
        self._features[read.row, places] = read.features[-count:].to(self._features.dtype)

    @torch.inference_mode()
    def commit(self, permanent: Permanent, predicted: Predicted, tops: TargetTops) -> None:
        """Keep all of it; of one sequence not more positions at once than a step may commit beside a whole window."""
        rows, labelled = permanent.rows, permanent.roots + 1
        self._features[rows, permanent.roots % self._places] = permanent.features.to(self._features.dtype)
        places = labelled % self._places
        self._top_ids[rows, places] = tops.ids.to(torch.int32)
        self._top_logprobs[rows, places] = tops.logprobs.to(torch.float16)
        self._marked[rows, places] = labelled.where(predicted.known, _NOWHERE)
        self._states[rows, places] = predicted.states.to(self._states.dtype)
        self._tokens[rows, places] = permanent.tokens
        self._chances[rows, places] = predicted.chances.float()
        self._rejected[rows, places] = permanent.rejected

    @torch.inference_mode(False)
    def finish(self, query: Query) -> QueryFeedback:
        """Take out what a query left behind, in tensors of its own."""
        row, length = query.row, len(query.tokens)
        first = max(self._first.pop(row, length - 1), length - self._window)
        prompt = max(self._prompt.pop(row, length), length - self._window)
        features = self._range(first, length - 1)
        labels = self._range(prompt, length)
        return QueryFeedback(
            query=query,
            prompt=prompt,
            first=first,
            features=self._features[row, features],
            top_ids=self._top_ids[row, labels],
            top_logprobs=self._top_logprobs[row, labels],
            draft_labels=self._draft_labels(row, labels, prompt),
            ready=reached(self._marked),
        )

    def _draft_labels(self, row: int, labels: Tensor, prompt: int) -> DraftLabels:
        """Of the answer's positions those that are marked, and not by an earlier lap. # labels [positions] places"""
        expected = prompt + torch.arange(labels.shape[0], device=labels.device)
        positions = self._marked[row, labels]
        every = DraftLabels(
            positions=positions,
            states=self._states[row, labels],
            tokens=self._tokens[row, labels],
            chances=self._chances[row, labels],
            rejected=self._rejected[row, labels],
            top_ids=self._top_ids[row, labels],
            top_logprobs=self._top_logprobs[row, labels],
        )
        return every.take((positions == expected).nonzero()[:, 0])  # planned transfer: their number, once per query

    def _range(self, start: int, end: int) -> Tensor:
        return torch.arange(start, max(start, end), device=self._marked.device) % self._places


def target_tops(scores: Tensor, top: int) -> TargetTops:
    """Ids and log-probabilities, likeliest first. # scores [positions, vocab], any float type"""
    scores = scores.to(torch.float32, copy=True)
    best, ids = likeliest(scores, top)
    highest = best[:, :1]
    # Half the time of `log_softmax`, which writes what is not kept and converts bf16 number by number.
    return TargetTops(ids, best - highest - scores.sub_(highest).exp_().sum(-1, keepdim=True).log_())


def likeliest(scores: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The highest scores of each row, highest first, and their places.

    Sought only in the `top` blocks with the highest maxima, which hold them all: half the time of looking at each.
    scores [positions, vocab] -> two [positions, top]
    """
    if scores.shape[1] < 2 * top * _BLOCK:
        found = scores.topk(top, dim=-1)
        return found.values, found.indices
    missing = -scores.shape[1] % _BLOCK
    blocks = (pad(scores, (0, missing), value=-torch.inf) if missing else scores).unflatten(1, (-1, _BLOCK))
    best = blocks.amax(-1).topk(top, dim=-1, sorted=False).indices  # [positions, top]
    line = torch.arange(scores.shape[0], device=scores.device)[:, None]
    within = blocks[line, best].flatten(1).topk(top, dim=-1)
    place = best.gather(1, within.indices // _BLOCK) * _BLOCK + within.indices % _BLOCK
    return within.values, place
