"""Where a drafter's training starts: at a copy of its target's end, fed with a guess of what that end would receive.
The last layers, the output norm and the head are the target's own. A copied layer works only on inputs of the kind it
was made for, so W_cond and W_fuse are set by two ridge regressions to predict, from the normalised features of one
position and the embedding of the next token, the top tapped feature of that *next* position: with taps (2, L/2, L-3)
and two layers this is exactly what the copied layers received in the target. Each tap's norm has the gain 1 / standard
deviation, because single dimensions of a residual stream are hundreds of times larger than the others.
The drafter thus begins as an approximate target without most of its layers, not as noise in front of good layers.
Where the target's layers are of another kind than a drafter's, its own begin by passing everything through."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafters.specblock.model import InputLayer, SpecBlock
from drafters.training.corpus import Example, TrainingError

_LEAST_PENALTY = 1e-3
_MOST_PENALTY = 1.0
_CROWDING = 0.3
_APART = 10  # every tenth position only judges
_CHUNK = 8192
_QUERY_SPREAD = 0.3
_LEAST_DEVIATION = 1e-3


@dataclass(frozen=True, slots=True)
class TargetEnd:
    """What a drafter copies from its target."""

    layers: Sequence[nn.Module]  # all decoder layers, first to last
    norm: nn.Module
    head: Tensor  # [vocab, hidden]
    embedding: Tensor  # [vocab, hidden]
    standard: bool = True  # False: layers and norm are none that a drafter can have


def initialise(
    model: SpecBlock, target: TargetEnd, examples: Sequence[Example], *, positions: int, generator: torch.Generator
) -> dict[str, Any]:
    """Set all weights but the rank head's, of a model that knows its vocabulary; how well. Raises TrainingError."""
    config = model.config
    if config.num_layers > len(target.layers):
        raise TrainingError(
            f"the target has {len(target.layers)} layers, so a drafter of {config.num_layers} cannot copy its end"
        )
    samples = _Samples(examples, target.embedding, model, positions, generator)
    layer = model.input_layer
    with torch.no_grad():
        _copy_end(model, target)
        if layer.feature_norms:
            _scale_taps(layer, samples)
        # W_cond: the part of the prediction that comes from the features, every dimension of unit size.
        solution, deviation, _ = _ridge(
            (torch.cat([*_normalised(layer, taps), known], -1), y) for taps, known, y in samples
        )
        width = layer.condition_proj.weight.shape[1]
        layer.condition_proj.weight.copy_((solution[:width] / deviation).T)
        explained = _fit_fuse(layer, samples, generator)
    received_from = len(target.layers) - 1 - config.num_layers
    return {
        "explained": explained,  # mean share of the copied layers' input variance, predicted on positions apart
        "exact": max(config.tap_layers) == received_from,  # else it is predicted from a layer near by
        "positions": samples.count,
    }


class _Samples:
    """Positions of randomly chosen examples, read anew at each pass: their features may not fit into memory.
    Yields what is known at some of them, taps and the next token's normalised embedding, and what is to be predicted,
    the next position's top tap; all [positions, hidden]."""

    def __init__(
        self,
        examples: Sequence[Example],
        embedding: Tensor,
        model: SpecBlock,
        positions: int,
        generator: torch.Generator,
    ) -> None:
        self._embedding, self._norm = embedding, model.input_layer.token_norm
        self._taps = len(model.config.tap_layers)
        self._top = model.config.tap_layers.index(max(model.config.tap_layers))
        self._device = model.d2t.device
        self._chosen: list[Example] = []
        self.count = 0
        for place in torch.randperm(len(examples), generator=generator).tolist():
            if self.count >= positions:
                break
            pairs = examples[place].length - self._first(examples[place]) - 1
            self._chosen += [examples[place]] if pairs > 0 else []
            self.count += max(0, pairs)
        if not self._chosen:
            raise TrainingError("no response has two tokens: there is nothing to train on; give more responses")

    def __iter__(self) -> Iterator[tuple[list[Tensor], Tensor, Tensor]]:
        waiting: list[Example] = []
        for example in self._chosen:
            waiting.append(example)
            if sum(e.length for e in waiting) >= _CHUNK or example is self._chosen[-1]:
                yield self._sample(waiting)
                waiting = []

    def _sample(self, examples: list[Example]) -> tuple[list[Tensor], Tensor, Tensor]:
        known = torch.cat([e.features[self._first(e) : -1] for e in examples]).to(self._device).float()
        following = torch.cat([e.features[self._first(e) + 1 :] for e in examples]).to(self._device).float()
        tokens = torch.cat([e.tokens[self._first(e) + 1 :] for e in examples]).to(self._embedding.device)
        embedded = self._norm(self._embedding[tokens].to(self._device).float())
        return list(known.chunk(self._taps, dim=-1)), embedded, following.chunk(self._taps, dim=-1)[self._top]

    @staticmethod
    def _first(example: Example) -> int:
        """Responses are what a drafter will continue; the position before the first is its first anchor."""
        return max(0, example.prompt - 2)


def penalty_for(inputs: int, positions: int) -> float:
    """More for nearly as many inputs as positions, which are learned by heart; yet more than this drafts worse."""
    return min(_MOST_PENALTY, max(_LEAST_PENALTY, _CROWDING * (inputs / positions) ** 2))


def _ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, float]:
    """Least squares with a penalty, in one pass over inputs and outputs, both [positions, size].
    Every tenth position only judges, or a second solution on top of this one could not be judged by them.
    -> the solution, whose last input is the constant 1 [in + 1, out], the standard deviation of each output [out], and
    the mean share of their variance that is explained on the positions apart; below 0 it only harms"""
    moments: list[Tensor] = [torch.zeros(()), torch.zeros(())]  # of inputs, 1 and outputs: positions known and apart
    size = 0
    for inputs, wanted in pairs:
        size = inputs.shape[1] + 1
        wide = torch.cat([inputs, torch.ones_like(inputs[:, :1]), wanted], dim=1)
        cut = wide.shape[0] - wide.shape[0] // _APART  # texts stand one behind the other
        for place, part in enumerate((wide[:cut], wide[cut:])):
            moments[place] = moments[place].to(part.device) + (part.T @ part).double()
    known, apart = moments
    if not apart[size - 1, size - 1]:
        raise TrainingError(f"fewer than {_APART} positions to start from; give more responses")
    damped = known[:size, :size].clone()  # the penalty is a share of each input's own size
    damped.diagonal().mul_(1.0 + penalty_for(size, round(float(known[size - 1, size - 1]))))
    damped.diagonal().clamp_(min=_LEAST_DEVIATION)  # an input that is always 0
    solution: Tensor = torch.linalg.solve(damped, known[:size, size:])
    gram, cross, squares = apart[:size, :size], apart[:size, size:], apart[size:, size:].diagonal()
    missed = squares - 2 * (solution * cross).sum(0) + (solution * (gram @ solution)).sum(0)
    explained = (1.0 - missed / apart[size - 1, size - 1] / _variance(apart, size)).mean()
    return solution.float(), _variance(known, size).sqrt().float(), float(explained)


def _variance(moments: Tensor, size: int) -> Tensor:
    """Of each output, from the moments behind so many inputs. # -> [out]"""
    count, sums = moments[size - 1, size - 1], moments[size - 1, size:]
    return (moments[size:, size:].diagonal() / count - (sums / count).square()).clamp(min=_LEAST_DEVIATION**2)


def _copy_end(model: SpecBlock, target: TargetEnd) -> None:
    own = list(model.decoder.layers)
    for layer, source in zip(own, target.layers[-len(own) :], strict=True):
        if target.standard:
            layer.load_state_dict(source.state_dict())
        else:  # what they add is learned
            for product in ("self_attn.o_proj", "mlp.down_proj"):
                layer.get_parameter(f"{product}.weight").zero_()
    if target.standard:
        model.decoder.norm.load_state_dict(target.norm.state_dict())
    rows = model.d2t.to(target.head.device)
    model.lm_head.weight.copy_(target.head[rows])
    hidden = model.config.hidden_size
    for shift in model.shift_proj.children():
        weight = shift.get_parameter("weight")
        weight.zero_()
        weight[:, :hidden] = torch.eye(hidden)  # pass each entry through; what its predecessor adds is learned


def _scale_taps(layer: InputLayer, samples: _Samples) -> None:
    """Norm gains under which every dimension of a tap has the same size."""
    gains = [norm.get_parameter("weight") for norm in layer.feature_norms.children()]
    for gain in gains:
        gain.fill_(1.0)
    squares = [torch.zeros_like(gain, dtype=torch.float64) for gain in gains]
    for taps, _, _ in samples:
        for square, tap in zip(squares, _normalised(layer, taps), strict=True):
            square += tap.double().square().sum(0)
    for gain, square in zip(gains, squares, strict=True):
        gain.copy_(1.0 / (square / samples.count).sqrt().clamp(min=_LEAST_DEVIATION))


def _fit_fuse(layer: InputLayer, samples: _Samples, generator: torch.Generator) -> float:
    """W_fuse on what W_cond makes; the constant enters through the position queries, which start close together."""
    conditions = ((layer.condition_norm(layer.condition(torch.cat(taps, -1))), known, y) for taps, known, y in samples)
    solution, _, explained = _ridge((torch.cat([condition, known], -1), y) for condition, known, y in conditions)
    entries, hidden = layer.position_queries.shape
    queries = 1.0 + _QUERY_SPREAD * torch.randn(entries, hidden, generator=generator)
    queries[0] = 1.0
    layer.position_queries.copy_(queries)
    layer.fuse.weight[:, : 2 * hidden].copy_(solution[: 2 * hidden].T)
    layer.fuse.weight[:, 2 * hidden :].copy_((solution[2 * hidden] / hidden)[:, None].expand(-1, hidden))
    return explained


def _normalised(layer: InputLayer, taps: list[Tensor]) -> list[Tensor]:
    """Each tap through its norm, or as it is in a drafter without such norms."""
    norms = list(layer.feature_norms.children())
    return [norm(tap) for norm, tap in zip(norms, taps, strict=True)] if norms else taps
