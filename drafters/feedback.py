"""What a drafter can learn from one finished query, and the tables it is collected in.
Legend: rows = sequences of the engine's table, positions = committed ones, width = taps * hidden, top = likeliest
tokens of the target that are kept, labels = positions for which the drafter had a state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from drafters.protocol import DraftContext, Read
from drafters.readback import reached
from drafters.tree import MAX_DEPTH

_PAST_END = MAX_DEPTH + 1  # positions a step may commit after the end of an answer
NOWHERE = -1
"""Position of a label that is padding."""
_BLOCK = 32  # scores whose maximum is looked at first


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
    num_prompt: int  # tokens of the prompt
    client: str
    store: bool  # False: must not be learnt from
    temperature: float
    seed: int  # of its sampling noise, signed 64 bits
    first_version: int  # of the drafter in its first step
    version: int  # of the drafter in its last step
    accepted: tuple[int, ...]  # accepted length of each verify with at least one drafted node
    plain_steps: int  # steps without one
    seconds: float  # its share of its steps; over all queries the time of serving without that of reading prompts
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
    """What was recorded of one finished query. Labels and features reach from the end of the answer as far back as the
    window; they are empty if the query was not recorded."""

    query: Query
    prompt: int  # position of the first label, where the answer or the kept part of it begins
    first: int  # position of the first features
    features: Tensor  # [length - 1 - first, taps * hidden]; the last token was never run
    top_ids: Tensor  # [length - prompt, top] int32, by position from `prompt` on
    top_logprobs: Tensor  # [length - prompt, top] float16
    draft_labels: DraftLabels
    ready: torch.cuda.Event | None  # when the tensors may be read by another stream; None: at once

    @property
    def recorded(self) -> bool:
        """Whether there is anything to learn from."""
        return self.prompt < len(self.query.tokens)


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
        self.max_sequences, self.hidden, self.top, self.dtype = max_sequences, hidden, top, dtype
        self._window = window_tokens
        self._places = window_tokens + _PAST_END

        def table(*shape: int, fill: float = 0, dtype: torch.dtype) -> Tensor:
            return torch.full((max_sequences, self._places, *shape), fill, dtype=dtype, device=device)

        self._features = table(width, dtype=dtype)
        self._labels = DraftLabels(
            positions=table(fill=NOWHERE, dtype=torch.int64),
            states=table(hidden, dtype=dtype),
            tokens=table(fill=-1, dtype=torch.int64),
            chances=table(dtype=torch.float32),
            rejected=table(dtype=torch.bool),
            top_ids=table(top, dtype=torch.int32),
            top_logprobs=table(top, dtype=torch.float16),
        )
        self._first: dict[int, int] = {}
        self._prompt: dict[int, int] = {}

    @torch.inference_mode()
    def start(self, contexts: Sequence[DraftContext]) -> None:
        """Begin recording these sequences; tokens generated before a preemption count as prompt."""
        for context in contexts:
            self._prompt[context.row] = len(context.tokens)
            self._first[context.row] = len(context.tokens) - 1
            self._labels.positions[context.row] = NOWHERE

    def forget(self, rows: Sequence[int]) -> None:
        """Stop recording the sequences of these rows, and drop what was kept."""
        for row in rows:
            self._prompt.pop(row, None)
            self._first.pop(row, None)

    @torch.inference_mode()
    def read(self, read: Read) -> None:
        """Keep the features of a piece of a prompt, as far as they fit the window."""
        self._first[read.row] = min(self._first[read.row], read.start)
        count = min(read.features.shape[0], self._window)
        start = read.start + read.features.shape[0] - count
        places = (start + torch.arange(count, device=self._features.device)) % self._places
        self._features[read.row, places] = read.features[-count:].to(self._features.dtype)

    @torch.inference_mode()
    def commit(self, rows: Tensor, roots: Tensor, features: Tensor, labels: DraftLabels) -> None:
        """Keep committed positions, in any order: roots and accepted nodes, each with the token after it. Positions of
        one sequence must span less than the window and what one step commits. `labels` has one for each, with position
        NOWHERE if no block had a state. # rows, roots [positions] int64, roots absolute; features [positions, width]"""
        self._features[rows, roots % self._places] = features.to(self._features.dtype)
        places = (roots + 1) % self._places
        for table, values in zip(self._labels.fields, labels.fields, strict=True):
            table[rows, places] = values.to(table.dtype)

    @torch.inference_mode(False)
    def finish(self, query: Query) -> QueryFeedback:
        """Return what was recorded of a finished query, copied out of the tables."""
        row, length = query.row, len(query.tokens)
        first = max(self._first.pop(row, length - 1), length - self._window)
        prompt = max(self._prompt.pop(row, length), length - self._window)
        features = self._range(first, length - 1)
        labels = self._range(prompt, length)
        kept = DraftLabels(*(table[row, labels] for table in self._labels.fields))
        # Labels of an earlier lap of the ring may remain.
        marked = kept.positions == prompt + torch.arange(labels.shape[0], device=labels.device)
        return QueryFeedback(
            query=query,
            prompt=prompt,
            first=first,
            features=self._features[row, features],
            top_ids=kept.top_ids,
            top_logprobs=kept.top_logprobs,
            draft_labels=kept.take(marked.nonzero()[:, 0]),  # planned transfer: their number, once per query
            ready=reached(self._features),
        )

    def _range(self, start: int, end: int) -> Tensor:
        return torch.arange(start, max(start, end), device=self._features.device) % self._places


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
