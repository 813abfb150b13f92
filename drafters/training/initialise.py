"""Initial weights of a drafter: copies of the target's last layers, output norm and head, and an input layer that
predicts the inputs of those layers in the target.

The input layer is solved by one ridge regression: from the normalised features of one position and the embedding of the
next token to the top tapped feature of that *next* position. With taps (2, L/2, L-3) and two layers this is exactly
what the copied layers received. The regression needs only sums over positions, so sequences may come one by one. With
injected context, the condition of a position is its own top tapped feature, from which the copied layers compute the
same keys and values as in the target, and the regression starts from that feature. The drafter's layers start as the
identity if the target's layers are not standard ones, and for inputs of mask tokens, where there is nothing to solve
and copied layers train worse (docs/training.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafters.network.config import DrafterConfig
from drafters.network.layers import Embed, LayerShape
from drafters.network.model import SpecBlock
from drafters.training.corpus import Example, TrainingError

_LEAST_PENALTY = 1e-3
_MOST_PENALTY = 1.0
_CROWDING = 0.3
_APART = 10  # every tenth sequence is held out to evaluate the regression
_TOGETHER = 1024
"""Positions whose products are added at once: on a CPU at 576 dimensions adding costs as much as the products of 256
positions."""
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True, slots=True)
class TargetEnd:
    """The layers, norm and head of the target, whose end a drafter copies."""

    layers: Sequence[nn.Module]  # all decoder layers, first to last
    norm: nn.Module
    head: Tensor  # [vocab, hidden]
    standard: bool = True  # False: drafters do not support such layers and norm


def initialise(
    model: SpecBlock,
    target: TargetEnd,
    embed: Embed,
    examples: Sequence[Example],
    *,
    positions: int,
    generator: torch.Generator,
) -> dict[str, Any]:
    """Set all weights but the rank head's of a model whose vocabulary is set, from at most `positions` positions of the
    examples. Returns facts about the regression (`explained`: R^2), empty if there is none. Raises TrainingError for
    too few examples."""
    copy_end(model, target)
    top = max(model.config.tap_layers)
    if not model.input_layer.is_solved:
        model.input_layer.start(embed)
        return {}
    sums, apart = InputSums(model.config, model.d2t.device), list[Example]()
    for number, place in enumerate(torch.randperm(len(examples), generator=generator).tolist()):
        if sums.positions >= positions:
            break
        if number % _APART == _APART - 1:
            apart.append(examples[place])
        else:
            sums.add(examples[place], embed)
    if not sums.positions or not apart:
        raise TrainingError(f"fewer than {_APART} responses: there is nothing to train on; give more responses")
    model.input_layer.solve(sums, generator)
    received_from = len(target.layers) - 1 - model.config.num_layers
    return {
        "explained": explained(model, embed, apart),
        "exact": top == received_from,  # False: the top tap is not the copied layers' input
        "positions": sums.positions,
    }


class FusedSolution(NamedTuple):
    """Linear prediction of the next position's top tap through a normed condition, as weights of an input layer."""

    deviations: Tensor  # [taps * hidden], root mean square of each tapped value
    condition: Tensor  # [taps * hidden, hidden]
    back: Tensor  # [hidden, hidden], from the normed condition
    token: Tensor  # [hidden, hidden], from the normed token
    constant: Tensor  # [hidden]


class InputSums:
    """The normal equations of the input layer: sums over positions of products of the inputs (taps, the next token's
    embedding, 1) with each other and with the regression target, the next position's top tap.
    Legend: known = (taps + 1) * hidden + 1."""

    def __init__(self, config: DrafterConfig, device: torch.device | str) -> None:
        self.hidden, self._epsilon = config.hidden_size, LayerShape.of(config.target).epsilon
        self._top = config.tap_layers.index(max(config.tap_layers))
        self._normalises, self._injected = config.traits.normed_parts > 0, config.traits.injected
        known = (len(config.tap_layers) + 1) * self.hidden + 1
        wide = known + self.hidden
        self._products = torch.zeros(known, wide, dtype=torch.float64, device=device)  # input times input and target
        self._squares = torch.zeros(self.hidden, dtype=torch.float64, device=device)  # sums of squared targets
        self._waiting: list[Tensor] = []  # known and target of some sequences, [positions, known + hidden] float32

    @property
    def positions(self) -> int:
        """Number of positions added so far."""
        return round(float(self._products[-1, self.known - 1])) + sum(len(one) for one in self._waiting)

    @property
    def known(self) -> int:
        """Number of inputs of the regression."""
        return self._products.shape[0]

    @torch.no_grad()
    def add(self, example: Example, embed: Embed) -> None:
        """Add all positions of a sequence except the last."""
        device, hidden = self._squares.device, (self.hidden,)
        features = example.features.to(device).float()
        taps, wanted = features[:-1].unflatten(1, (-1, self.hidden)), features[1:].unflatten(1, (-1, self.hidden))
        if self._normalises:
            taps = torch.rms_norm(taps, hidden, None, self._epsilon)
        embedded = torch.rms_norm(embed(example.tokens[1:].to(device)).float(), hidden, None, self._epsilon)
        known = torch.cat([taps.flatten(1), embedded, torch.ones_like(embedded[:, :1])], dim=1)
        self._waiting.append(torch.cat([known, wanted[:, self._top]], dim=1))
        if sum(len(one) for one in self._waiting) >= _TOGETHER:
            self._sum_up()

    def linear_guess(self) -> Tensor:
        """Return the regression's weights on the taps. # -> [taps * hidden, hidden]"""
        self._sum_up()
        return self._solution(torch.arange(self.known, device=self._squares.device))[: self.known - self.hidden - 1]

    def fused(self) -> FusedSolution:
        """Return the regression's solution, split into the weights of an input layer with a condition."""
        self._sum_up()
        hidden, gram = self.hidden, self._products[:, : self.known]
        taps, count = self.known - hidden - 1, self._ones[-1]
        condition, back, other = self._parts(taps)
        size = ((condition * (gram[:taps, :taps] @ condition)).sum() / count / hidden).sqrt()
        deviations = (gram.diagonal()[:taps] / count).sqrt().clamp(min=_LEAST_DEVIATION)
        if self._normalises:  # single dimensions of a residual stream are hundreds of times larger than the others
            condition = condition * deviations[:, None]
        return FusedSolution(deviations, condition, back * size, other[:-1], other[-1])

    def _parts(self, taps: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the matrices from taps to condition, from condition to prediction, and from token and 1 to prediction.
        The condition is the taps' part of the prediction, in units of each output's deviation; with injected context it
        is the top tap. # -> [taps * hidden, hidden], [hidden, hidden], [hidden + 1, hidden]"""
        hidden, count, sums = self.hidden, self._ones[-1], self._products[-1, self.known :]
        places = torch.arange(self.known, device=self._squares.device)
        if not self._injected:
            solution = self._solution(places)
            deviation = (self._squares / count - (sums / count).square()).clamp(min=_LEAST_DEVIATION**2).sqrt()
            return solution[:taps] / deviation, torch.diag(deviation), solution[taps:]
        top = places[self._top * hidden : (self._top + 1) * hidden]
        solution = self._solution(torch.cat([top, places[taps:]]))
        condition = self._products.new_zeros(taps, hidden)
        condition[top] = torch.eye(hidden, dtype=condition.dtype, device=condition.device)
        return condition, solution[:hidden], solution[hidden:]

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums by name, not copied. # products [known, known + hidden], squares [hidden]"""
        self._sum_up()
        return {"products": self._products, "squares": self._squares}

    def _sum_up(self) -> None:
        """Add the waiting positions to the sums."""
        if not self._waiting:
            return
        both, self._waiting = torch.cat(self._waiting), []
        self._products += both[:, : self.known].T @ both
        self._squares += both[:, self.known :].double().square().sum(0)

    @property
    def _ones(self) -> Tensor:
        """Sums of the inputs; the last one is the number of positions. # [known]"""
        return self._products[-1, : self.known]

    def _solution(self, inputs: Tensor) -> Tensor:
        """Solve the ridge regression from these inputs, with a penalty proportional to each input's magnitude.
        # inputs [n] int64 -> [n, hidden]"""
        damped = self._products[inputs[:, None], inputs]
        damped.diagonal().mul_(1.0 + penalty_for(len(inputs), self.positions))
        damped.diagonal().clamp_(min=_LEAST_DEVIATION)  # for inputs that are always 0
        return torch.cholesky_solve(self._products[inputs, self.known :], torch.linalg.cholesky(damped))


def sums_bytes(config: DrafterConfig) -> tuple[int, int]:
    """Return the bytes of a drafter's `InputSums`, and the further bytes to solve them: damped products, their factor,
    right-hand side and solution."""
    hidden = config.hidden_size
    known = (len(config.tap_layers) + 1) * hidden + 1
    return 8 * (known * (known + hidden) + hidden), 8 * (2 * known * known + 2 * known * hidden)


def penalty_for(inputs: int, positions: int) -> float:
    """Return the ridge penalty, which grows with the ratio of inputs to positions, against overfitting. Larger
    penalties gave worse drafters."""
    return min(_MOST_PENALTY, max(_LEAST_PENALTY, _CROWDING * (inputs / positions) ** 2))


@torch.no_grad()
def explained(model: SpecBlock, embed: Embed, examples: Sequence[Example]) -> float:
    """Return the explained variance (R^2) of the input layer's prediction of the next position's top tap, on held-out
    sequences."""
    top = model.config.tap_layers.index(max(model.config.tap_layers))
    missed, wanted = [], []
    for example in examples:
        features, tokens = (values.to(model.d2t.device) for values in (example.features.float(), example.tokens))
        own = model.input_layer.blocks(model.input_layer.condition(features[:-1]), embed(tokens[1:]), slice(1))
        wanted.append(features[1:].unflatten(1, (-1, model.config.hidden_size))[:, top])
        missed.append(wanted[-1] - own[:, 0, : model.config.hidden_size])
    variance = torch.cat(wanted).var(0, correction=0).clamp(min=_LEAST_DEVIATION**2)
    return float((1.0 - torch.cat(missed).square().mean(0) / variance).mean())


@torch.no_grad()
def _copy_layer(layer: nn.Module, source: Mapping[str, Tensor]) -> None:
    """Copy a layer. Weights for the further input of the copy (the token of EAGLE-3) become 0.
    # source [...] each"""
    for name, value in layer.state_dict().items():
        value.zero_()
        value[..., -source[name].shape[-1] :] = source[name]


@torch.no_grad()
def copy_end(model: SpecBlock, target: TargetEnd) -> None:
    """Copy layers (or make them the identity), output norm and head from the target to a model with its vocabulary set.
    Raises TrainingError if the target has too few layers."""
    own = list(model.decoder.layers)
    if len(own) > len(target.layers):
        raise TrainingError(
            f"the target has {len(target.layers)} layers, so a drafter of {len(own)} cannot copy its end"
        )
    for layer, source in zip(own, target.layers[len(target.layers) - len(own) :], strict=True):
        same = layer.state_dict().keys() == source.state_dict().keys()
        if target.standard and same and model.input_layer.is_solved:
            _copy_layer(layer, source.state_dict())
        else:  # the identity at first
            for product in ("self_attn.o_proj", "mlp.down_proj"):
                layer.get_parameter(f"{product}.weight").zero_()
    gain = model.decoder.norm.get_parameter("weight")
    gain.copy_(target.norm.get_parameter("weight") if target.standard else target.norm(torch.ones_like(gain)))
    rows = model.d2t.to(target.head.device)
    model.lm_head.weight.copy_(target.head[rows])
    hidden = model.config.hidden_size
    for shift in model.shift_proj.children():
        weight = shift.get_parameter("weight")
        weight.zero_()
        weight[:, :hidden] = torch.eye(hidden)  # the identity: the previous entry adds nothing at first
