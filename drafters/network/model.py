"""The SpecBlock network in its differentiable form: one forward turns anchors into blocks of K dependent positions.

An anchor t is a position whose target features are known together with the next token. Entry k of anchor t (k = 1..K)
stands at position t + k and predicts the token at t + k + 1:
    h0_k = W_fuse [norm(c_t); norm(e(x_{t+1})); norm(q_k)],    c_t = W_cond [h_low; h_mid; h_top]     (section 3.1)
    h_k <- W_shift [h_k; h_{k-1}],  h_0 := h_1,                between the decoder layers              (section 3.2)
The `Structure` of a kind gives the input layer and may replace other parts. `served.py` runs the same weights while
serving. The caller decides which rows attend to which.
Legend: batch, rows = entries of one sequence in one forward, hidden, dim = head_dim, taps, draft_vocab; width = hidden,
or 2 * hidden where the state before the output norm is appended (`continues_raw`)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from drafters.calibration import class_logits
from drafters.network.config import DrafterConfig as DrafterConfig
from drafters.network.layers import Attend, DrafterLayer, KeysValues
from drafters.network.layers import Embed as Embed
from drafters.network.structure import Structure
from kernels.lattice import NUM_FEATURES, TOP

FEATURE_SCALE = 0.2  # of rank features: log-probabilities and entropies reach 10
RANK_EPSILON = torch.finfo(torch.float32).eps
RANK_CLASSES = 4
"""Classes of the target token's rank in the drafter's distribution: 1, 2-4, 5-10, beyond (SpecBlock appendix B)."""


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The entries that one forward runs."""

    inputs: Tensor  # [batch, rows, width], the input layer's output h0
    positions: Tensor  # [batch, rows] int64
    previous: Tensor  # [batch, rows] int64, row of the previous entry of the block; for the first entry its own row


class SpecBlock(nn.Module):
    """Network of all trained kinds: input layer, decoder layers with shifts between them, draft head and rank head. The
    token embedding is the target's, and not part of the module."""

    t2d: Tensor  # [target_vocab] int64, draft id of a target token, -1 for tokens the drafter cannot propose
    d2t: Tensor  # [draft_vocab] int64, target id of a draft token

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.structure: Structure = config.structure()
        self.traits = config.traits
        structure, hidden, ranks = self.structure, config.hidden_size, self.traits.rank_head
        self.input_layer = structure.input_layer()
        self.decoder = structure.decoder()
        self.shift_proj = nn.ModuleList(nn.Linear(2 * hidden, hidden, bias=False) for _ in range(self.traits.shifts))
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.rank_head = nn.Sequential(
            nn.Linear(hidden + NUM_FEATURES, config.rank_hidden, bias=ranks.biases),
            nn.SiLU(),
            nn.Linear(config.rank_hidden, RANK_CLASSES, bias=ranks.biases),
        )
        self.rank_norm = nn.RMSNorm(hidden, eps=RANK_EPSILON) if ranks.normalised else None
        self.path_head = structure.path_head()
        self.register_buffer("d2t", torch.arange(config.draft_vocab_size), persistent=False)
        self.register_buffer("t2d", torch.full((config.target_vocab_size,), -1), persistent=False)

    def set_vocabulary(self, d2t: Tensor) -> None:
        """Set the tokens that can be drafted. # d2t [draft_vocab] int64, target ids"""
        self.d2t.copy_(d2t)
        self.t2d.fill_(-1)
        self.t2d[d2t] = torch.arange(d2t.shape[0], device=self.t2d.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.lm_head.weight.dtype

    def forward(self, rows: BlockRows, attend: Attend) -> Tensor:
        """Run the layers, and return the states after the output norm, for the heads and for further blocks.
        # -> [batch, rows, width], split by `heads_and_context`"""
        inputs, width = rows.inputs.to(self.dtype), self.config.hidden_size  # autocast rounds only matrix products
        hidden, extra = inputs[..., :width], inputs[..., width:]
        rotary = self.decoder.shape.rotary(rows.positions, self.dtype)
        for number, layer in enumerate(self.decoder.layers):
            if number and self.shift_proj:
                before = torch.take_along_dim(hidden, rows.previous[:, :, None], dim=1)
                hidden = self.shift_proj[number - 1](torch.cat([hidden, before], dim=-1)).to(self.dtype)
            hidden = layer(hidden, rotary, partial(attend, number), None if number else extra)
        return self.structure.output(self.decoder.norm(hidden), hidden)

    def heads_and_context(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Split states into the input of the heads and the context of blocks that start there, equal for most kinds.
        # states [..., width] -> both [..., hidden]"""
        return states[..., : self.config.hidden_size], states[..., -self.config.hidden_size :]

    def injected(self, context: Tensor, positions: Tensor) -> list[KeysValues]:
        """Return each layer's keys and values of committed positions, computed from their condition (injected context).
        # context [batch, rows, hidden], positions [batch, rows] int64 -> per layer [batch, kv_heads, rows, dim]"""
        context, rotary = context.to(self.dtype), self.decoder.shape.rotary(positions, self.dtype)
        layers = [layer for layer in self.decoder.layers if isinstance(layer, DrafterLayer)]
        shared = self.structure.injection_norm(self.input_layer)
        normed = [(shared or layer.norms.attention_input)(context) for layer in layers]
        return [layer.self_attn.keys_values(own, rotary) for layer, own in zip(layers, normed, strict=True)]

    def head(self, states: Tensor) -> Tensor:
        """Return the logits of the draft head. # states [..., hidden] -> [..., draft_vocab]"""
        logits: Tensor = self.lm_head(states)
        return logits

    def rank_logits(self, states: Tensor, features: Tensor) -> Tensor:
        """Return the logits of the rank classes (section 3.2). # states [..., hidden], features [..., 15] -> [..., 4]
        float32"""
        logits: Tensor = self.rank_head[-1](self.rank_inputs(states, features)).float()
        return logits + class_logits(features[..., :TOP].float()) if self.traits.rank_head.from_draft else logits

    def rank_inputs(self, states: Tensor, features: Tensor) -> Tensor:
        """Return the input of the rank head's last layer.
        # states [..., hidden], features [..., 15] -> [..., rank_hidden]"""
        states, features = states.to(self.dtype), features.to(self.dtype)
        if self.rank_norm is not None:
            states, features = self.rank_norm(states), features * FEATURE_SCALE
        inputs: Tensor = self.rank_head[:-1](torch.cat([states, features], dim=-1))
        return inputs
