"""The network of published DFlash weights: a block begins as embeddings alone, of the newest token and then of a mask
token, and one norm for all layers stands between the condition and the keys and values that they make of it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from drafters.network.config import SpecBlockConfig
from drafters.network.layers import Input, LayerShape, Norm
from drafters.network.structure import ServedInput, ServedLayer, Structure, WeightPlanner, feature_norms
from kernels.decoder_layer import DecoderLayer


class MaskTokens(Input):
    """Begins blocks with the newest token's embedding and the mask token's."""

    def __init__(self, config: SpecBlockConfig, shape: LayerShape) -> None:
        super().__init__()
        self.condition_proj = nn.Linear(config.features_size, shape.hidden, bias=False)
        self.condition_norm = Norm(shape.hidden, shape.epsilon)
        self.mask_embedding = nn.Parameter(torch.randn(shape.hidden))  # the target's, of the mask token
        self.feature_norms = feature_norms(config, shape.epsilon)
        self._masked = config.forward_size - 1

    def blocks(self, context: Tensor, embedded: Tensor, entries: slice) -> Tensor:
        token = embedded.to(self.mask_embedding.dtype)[..., None, :]
        masks = self.mask_embedding.detach().expand(*token.shape[:-2], self._masked, -1)  # the target's: not trained
        return torch.cat([token, masks], dim=-2)[..., entries, :]

    @torch.no_grad()
    def start_from(self, mask: Tensor) -> None:
        """Set the mask token's embedding. # mask [hidden]"""
        self.mask_embedding.copy_(mask)


class MaskTokenStructure(Structure):
    """DFlash and JetSpec as their authors publish them."""

    def input_layer(self) -> Input:
        return MaskTokens(self.config, self.shape)

    def served_input(self, planner: WeightPlanner) -> ServedInput:
        mask, masked = planner.tensor(planner.weights["input_layer.mask_embedding"]), self.config.forward_size - 1

        def blocks(context: Tensor, embedded: Tensor) -> Tensor:
            return torch.cat([embedded.to(mask.dtype)[:, None], mask.expand(len(embedded), masked, -1)], dim=1)

        return blocks

    def injected_into(self, layers: Sequence[ServedLayer], planner: WeightPlanner) -> Sequence[ServedLayer]:
        norm = planner.tensor(planner.weights["input_layer.condition_norm.weight"])
        known = [layer for layer in layers if isinstance(layer, DecoderLayer)]
        return [replace(layer, norms=layer.norms._replace(attention_input=norm)) for layer in known]
