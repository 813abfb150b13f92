"""What a step carries, and what became of it: the records between the draft stage, budgets and measured costs."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Load:
    """What a step carries beside draft trees."""

    num_rows: int  # rows that run in any case: roots and prompt chunks
    context: float  # mean context length of the step's sequences, tokens
    max_nodes: int  # most nodes in all, because slots are short
    num_drafting: int = 1  # sequences that may have a tree
    num_sequences: int = 1  # all of the step's sequences
    weights: Tensor | None = None  # [drafting] float32, what a token of each counts; None: all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What became of a decision."""

    load: Load
    drafted: bool  # whether the drafter was asked
    followed: bool  # whether it was to take in prompts and answers
    num_nodes: int  # nodes verified, all sequences together
    accepted_tokens: int
    draft_seconds: float
    verify_seconds: float
    follow_seconds: float  # what that took, drafted or not
    other_seconds: float
