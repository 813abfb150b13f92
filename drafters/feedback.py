"""Training records of one finished query.
Legend: rows = sequences of the engine's table, positions = committed ones, width = taps * hidden, top = number
of the target's likeliest tokens that are kept, labels = positions for which the drafter had a state."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.entries import NOWHERE as NOWHERE
from kernels.entries import DraftLabels as DraftLabels

USUAL_NODES = 8
"""Nodes of a draft where the number is not known."""


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
    drafted_nodes: int = 0  # verified nodes in all its steps
    scope: str = ""  # namespace of the past answers that it belongs to

    @property
    def answer(self) -> Sequence[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt :]

    @property
    def num_steps(self) -> int:
        """Number of decoding steps."""
        return len(self.accepted) + self.plain_steps

    @property
    def nodes_of_drafts(self) -> int:
        """Mean number of nodes of its steps with drafted nodes, rounded, at least 1; a usual one if there are none."""
        return max(1, round(self.drafted_nodes / len(self.accepted))) if self.drafted_nodes else USUAL_NODES


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
    past: Tensor | None = None  # [length - prompt, orders, ways] int64, past answers' entries before each token
    regression: Tensor | None = None  # [2, sets, weights] float32, the memory's weights and squares; both or none

    @property
    def recorded(self) -> bool:
        """Whether the query was recorded, so that there are labels."""
        return self.prompt < len(self.query.tokens)
