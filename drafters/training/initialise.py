"""Where a drafter's training starts: at a copy of its target's end, fed with a guess of what that end would receive.

The last layers, the output norm and the head are the target's own. A copied layer works only on inputs of the kind it
was made for, so W_cond and W_fuse are set by two ridge regressions to predict, from the normalised features of one
position and the embedding of the next token, the top tapped feature of that *next* position: with taps (2, L/2, L-3)
and two layers this is exactly what the copied layers received in the target. Each tap's norm has the gain 1 / standard
deviation, because single dimensions of a residual stream are hundreds of times larger than the others.
The drafter thus begins as an approximate target without most of its layers, not as noise in front of good layers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Initialisation:
    """How well the start was prepared."""

    explained: float  # mean share of the variance of the copied layers' input that is predicted on positions apart
    exact: bool  # the predicted feature is what the copied layers received; otherwise one from a layer near by
    positions: int


def initialise(
    model: SpecBlock, target: TargetEnd, examples: Sequence[Example], *, positions: int, generator: torch.Generator
) -> Initialisation:
    """Set all weights but the rank head's. `model` knows its vocabulary already. Raises TrainingError."""
    config = model.config
    if config.num_layers > len(target.layers):
        raise TrainingError(
            f"the target has {len(target.layers)} layers, so a drafter of {config.num_layers} cannot copy its end"
        )
    samples = _Samples(examples, target.embedding, model, positions, generator)
    with torch.no_grad():
        _copy_end(model, target)
        _scale_taps(model.input_layer, samples)
        _fit_condition(model.input_layer, samples)
        explained = _fit_fuse(model.input_layer, samples, generator)
    received_from = len(target.layers) - 1 - config.num_layers
    return Initialisation(explained, max(config.tap_layers) == received_from, samples.count)


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some positions of texts: what is known at them, and what is to be predicted of the next."""

    taps: list[Tensor]  # each [positions, hidden]
    embedded: Tensor  # [positions, hidden], the next token's
    wanted: Tensor  # [positions, hidden], the next position's top tap


class _Samples:
    """Positions of randomly chosen examples, read anew at each pass: their features may not fit into memory."""

    def __init__(
        self,
        examples: Sequence[Example],
        embedding: Tensor,
        model: SpecBlock,
        positions: int,
        generator: torch.Generator,
    ) -> None:
        self._embedding = embedding
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

    def __iter__(self) -> Iterator[_Sample]:
        waiting: list[Example] = []
        for example in self._chosen:
            waiting.append(example)
            if sum(e.length for e in waiting) >= _CHUNK:
                yield self._sample(waiting)
                waiting = []
        if waiting:
            yield self._sample(waiting)

    def _sample(self, examples: list[Example]) -> _Sample:
        known = torch.cat([e.features[self._first(e) : -1] for e in examples]).to(self._device).float()
        following = torch.cat([e.features[self._first(e) + 1 :] for e in examples]).to(self._device).float()
        tokens = torch.cat([e.tokens[self._first(e) + 1 :] for e in examples]).to(self._embedding.device)
        return _Sample(
            taps=list(known.chunk(self._taps, dim=-1)),
            embedded=self._embedding[tokens].to(self._device).float(),
            wanted=following.chunk(self._taps, dim=-1)[self._top],
        )

    @staticmethod
    def _first(example: Example) -> int:
        """Responses are what a drafter will continue; the position before the first is its first anchor."""
        return max(0, example.prompt - 2)


class _Sums:
    """What least squares needs to know of its data."""

    def __init__(self) -> None:
        self.gram: Tensor = torch.zeros(())  # [in, in]
        self.cross: Tensor = torch.zeros(())  # [in, out]
        self.squares: Tensor = torch.zeros(())  # [out]
        self.count = 0

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        self.gram = self.gram.to(inputs.device) + (inputs.T @ inputs).double()
        self.cross = self.cross.to(inputs.device) + (inputs.T @ wanted).double()
        self.squares = self.squares.to(inputs.device) + wanted.double().square().sum(0)
        self.count += inputs.shape[0]

    @property
    def variance(self) -> Tensor:
        """Of each output; the last input is the constant 1. # -> [out]"""
        mean = self.cross[-1] / self.count
        return (self.squares / self.count - mean.square()).clamp(min=_LEAST_DEVIATION**2)

    def solve(self, penalty: float) -> Tensor:
        """The penalty is a share of each input's own size. # -> [in, out]"""
        damped = self.gram.clone()
        damped.diagonal().mul_(1.0 + penalty)
        damped.diagonal().clamp_(min=_LEAST_DEVIATION)  # an input that is always 0
        solution: Tensor = torch.linalg.solve(damped, self.cross)
        return solution

    def explained(self, weights: Tensor) -> float:
        """Mean over the outputs of the share of their variance that a solution explains; below 0 it only harms."""
        missed = self.squares - 2 * (weights * self.cross).sum(0) + (weights * (self.gram @ weights)).sum(0)
        return float((1.0 - missed / self.count / self.variance).mean())


def penalty_for(inputs: int, positions: int) -> float:
    """A solution of nearly as many inputs as positions learns them by heart, so it needs more penalty.

    More than this explains more variance and drafts worse: a prediction drawn to the mean makes the head timid.
    """
    return min(_MOST_PENALTY, max(_LEAST_PENALTY, _CROWDING * (inputs / positions) ** 2))


class _Ridge:
    """Least squares with a penalty, judged on positions apart; the last input is the constant 1."""

    def __init__(self) -> None:
        self._known = _Sums()
        self._apart = _Sums()

    def add(self, inputs: Tensor, wanted: Tensor) -> None:
        """inputs [positions, in], wanted [positions, out]; texts stand one behind the other."""
        wide = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        cut = wide.shape[0] - wide.shape[0] // _APART
        self._known.add(wide[:cut], wanted[:cut])
        self._apart.add(wide[cut:], wanted[cut:])

    def solve(self) -> tuple[Tensor, float]:
        """The solution, and what it explains of the positions apart. # -> [in + 1, out] float32

        Those stay out of it, or a second solution on top of this one could not be judged by them.
        """
        if not self._apart.count:
            raise TrainingError(f"fewer than {_APART} positions to start from; give more responses")
        solution = self._known.solve(penalty_for(self._known.gram.shape[0], self._known.count))
        return solution.float(), self._apart.explained(solution)

    @property
    def deviation(self) -> Tensor:
        """Standard deviation of each output. # -> [out] float32"""
        return self._known.variance.sqrt().float()


def _copy_end(model: SpecBlock, target: TargetEnd) -> None:
    own = list(model.decoder.get_submodule("layers").children())
    for layer, source in zip(own, target.layers[-len(own) :], strict=True):
        layer.load_state_dict(source.state_dict())
    model.decoder.get_submodule("norm").load_state_dict(target.norm.state_dict())
    rows = model.d2t.to(target.head.device)
    model.lm_head.weight.copy_(target.head[rows])
    hidden = model.config.hidden_size
    for shift in model.shift_proj.children():
        weight = shift.get_parameter("weight")
        weight.zero_()
        weight[:, :hidden] = torch.eye(hidden)  # pass each entry through; what its predecessor adds is learned


def _scale_taps(layer: InputLayer, samples: _Samples) -> None:
    """Norm gains under which every dimension of a tap has the same size; a drafter without norms has none to set."""
    if not layer.feature_norms:
        return
    for norm in layer.feature_norms.children():
        norm.get_parameter("weight").fill_(1.0)
    squares = [torch.zeros(()) for _ in layer.feature_norms]
    for sample in samples:
        for place, tap in enumerate(_normalised(layer, sample.taps)):
            squares[place] = squares[place].to(tap.device) + tap.double().square().sum(0)
    for norm, square in zip(layer.feature_norms.children(), squares, strict=True):
        deviation = (square / samples.count).sqrt().clamp(min=_LEAST_DEVIATION)
        norm.get_parameter("weight").copy_(1.0 / deviation)


def _fit_condition(layer: InputLayer, samples: _Samples) -> None:
    """W_cond: the part of the prediction that comes from the features, every dimension of unit size."""
    ridge = _Ridge()
    for sample in samples:
        taps = _normalised(layer, sample.taps)
        ridge.add(torch.cat([*taps, layer.token_norm(sample.embedded)], dim=-1), sample.wanted)
    width = layer.condition_proj.weight.shape[1]
    solution, _ = ridge.solve()
    layer.condition_proj.weight.copy_((solution[:width] / ridge.deviation).T)


def _fit_fuse(layer: InputLayer, samples: _Samples, generator: torch.Generator) -> float:
    """W_fuse on what W_cond makes; the constant enters through the position queries, which start close together."""
    ridge = _Ridge()
    for sample in samples:
        condition = layer.condition_norm(layer.condition(torch.cat(sample.taps, dim=-1)))
        ridge.add(torch.cat([condition, layer.token_norm(sample.embedded)], dim=-1), sample.wanted)
    solution, explained = ridge.solve()
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
