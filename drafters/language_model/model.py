"""What a drafter needs of a language model; whoever loads models implements it."""

from typing import Protocol

from torch import Tensor

from kernels.tree_attention import AttentionRows


class Output(Protocol):
    """What came of a forward."""

    @property
    def logits(self) -> Tensor:
        """# [logits, vocab]"""


class LanguageModel(Protocol):
    """A causal language model, or its first layers, whose keys and values lie under the target's slot ids; behind the
    slots is room for nodes of draft trees."""

    vocab_size: int

    @property
    def scratch(self) -> Tensor:
        """Places behind the slots, which nobody else uses. # [places] int64"""

    def compute(
        self, tokens: Tensor, attention: AttentionRows, slots: Tensor, logit_rows: Tensor, slot_table: Tensor
    ) -> Output:
        """Run rows: keys and values go to `slots`, logits come of `logit_rows`. # tokens, slots [rows] int64;
        logit_rows [logits] int64; slot_table [table rows, positions] int64"""
