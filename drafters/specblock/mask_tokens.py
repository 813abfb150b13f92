"""The network of published DFlash weights: a block's rows begin as embeddings alone, of the newest token and then of a
mask token. The condition is normed itself, and injected into layers without their input norm.
Legend: rows, hidden, entries = rows of one block, taps."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafters.specblock.config import SpecBlockConfig
from drafters.specblock.layers import Input, LayerShape, Norm
from drafters.specblock.structure import ServedInput, ServedLayer, Structure, WeightPlanner, feature_norms
from kernels.decoder_layer import DecoderLayer


class MaskTokens(Input):
    """Begins blocks with the newest token's embedding and the mask token's, and norms the condition."""

    def __init__(self, config: SpecBlockConfig, shape: LayerShape) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(config.features_size, shape.hidden, bias=False)
        self.condition_norm = Norm(shape.hidden, shape.epsilon)
        self.mask_embedding = nn.Parameter(torch.randn(shape.hidden))  # the target's, of the mask token
        self.feature_norms = feature_norms(config, shape.epsilon)
        self._masked = config.forward_size - 1

    def condition(self, features: Tensor) -> Tensor:
        return self.condition_norm(super().condition(features))

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        token = embedded.to(self.mask_embedding.dtype)[..., None, :]
        masks = self.mask_embedding.detach().expand(*token.shape[:-2], self._masked, -1)  # the target's: not trained
        return torch.cat([token, masks], dim=-2)[..., entries, :]


class MaskTokenStructure(Structure):
    """DFlash, and JetSpec, as their authors publish them."""

    def input_layer(self) -> Input:
        return MaskTokens(self.config, self.shape)

    def served_condition(self, planner: WeightPlanner) -> Callable[[Tensor], Tensor]:
        project = super().served_condition(planner)
        norm = planner.norm("input_layer.condition_norm.weight", self.shape.epsilon)
        return lambda features: norm(project(features))

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        masked = self.config.forward_size - 1
        mask = planner.tensor(planner.weights["input_layer.mask_embedding"])

        def blocks(context: Tensor, embedded: Tensor) -> Tensor:
            token = embedded.to(context.dtype)[:, None]
            return torch.cat([token, mask.expand(len(token), masked, -1)], dim=1)

        return blocks

    def injected_into(self, layers: Sequence[ServedLayer]) -> Sequence[ServedLayer]:
        known = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        return [replace(layer, norms=layer.norms._replace(attention_input=None)) for layer in known]
