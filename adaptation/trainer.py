"""Trains a drafter's training copy: its heads alone, or all weights.

An update is applied as a whole or not at all: if a loss, a gradient, a weight or the optimizer's state is not finite,
training copy and optimizer are restored. Legend: rows = labelled positions of all samples, vocab = the drafter's.
"""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from adaptation.checkpoint import all_finite
from adaptation.config import AdaptationConfig, Tuning
from adaptation.evaluator import Rows, TextDivergence
from adaptation.policy import Arm
from adaptation.records import Outcome
from adaptation.replay_buffer import PROMPT
from adaptation.samples import TrainingSample
from adaptation.timing import Pieces
from adaptation.weights import ServedDrafter
from drafters.coupling import TreeNoise
from drafters.feedback import DraftLabels
from drafters.network.checkpoint import weights_of, write_weights
from drafters.network.model import Embed, SpecBlock
from drafters.protocol import Noise
from drafters.training.corpus import Batch, Example
from drafters.training.fit import clipped_gradients
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.training.output_layers import OUTPUT_LAYERS, head_loss

_ANCHORS = 4  # blocks per text for the distance to the anchor
_HEAD_ROWS = 512  # draft labels per head update, as many as four to eight queries have
_RANK_ROWS = 128  # entries per step that train the rank head; sampling noise for one costs as much as its products
_adamw = partial(adamw, fused=True, amsgrad=False, maximize=False, beta1=0.9, beta2=0.98, weight_decay=0.0, eps=1e-8)

_SOLVED_STEP = 0.01
"""Step size for a drafter that was solved and not trained yet, in units of each parameter's root mean square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings shared by all updates of a trainer."""

    learning_rate: float  # rate of full updates; with `relative`, in units of each parameter's root mean square
    relative: bool
    anchor_weight: float
    blocks: int  # trained blocks per tree
    autocast: bool  # products in bf16; weights, sums and optimizer in fp32
    tuning: Tuning


def rules_of(config: AdaptationConfig, drafter: ServedDrafter, tuning: Tuning, *, autocast: bool) -> Rules:
    """Return the update settings of a drafter. One that is solved from traffic trains with steps relative to the size
    of its weights, and larger ones."""
    if not drafter.made:
        tuning = replace(tuning, update_norm=_SOLVED_STEP * tuning.full_steps)
    return Rules(
        learning_rate=config.learning_rate if drafter.made else _SOLVED_STEP,
        relative=not drafter.made,
        anchor_weight=config.anchor_weight,
        blocks=drafter.blocks,
        autocast=autocast,
        tuning=tuning,
    )


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """Outcome of an update."""

    arm: Arm
    outcome: Outcome
    seconds: float
    losses: tuple[dict[str, float], ...] = ()  # loss terms, a dict per step; only the last step of a pass has `anchor`
    moved: float = 0.0  # norm of the change over norm of the weights, after clipping

    @property
    def applied(self) -> bool:
        """Whether the update changed the weights."""
        return self.outcome == "applied"


class _Discard(Exception):
    """Raised to end an update without applying it."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome: Outcome = outcome


_Terms = tuple[Tensor, dict[str, Tensor]]  # the loss of a step, and its terms by name


class Adam:
    """AdamW without weight decay, whose state exists from the start, so that it can be saved, shared and restored by
    name. `torch.optim.AdamW` allocates its state at the first step, and loads torch's compiler, which takes seconds."""

    gradient_norm = 1.0  # gradients are clipped to this norm

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], *, rate: float, warm_up_steps: int = 1, relative: bool = False
    ) -> None:
        """`warm_up_steps`: steps after a reset over which the rate rises; `relative`: `rate` is in units of each
        parameter's root mean square before the first step."""
        self._warm_up_steps = warm_up_steps
        self._parameters = dict(parameters)
        self._rate = rate
        self._relative = {name: torch.zeros((), dtype=torch.float64) for name in parameters if relative}  # 0: not known
        self._state = {
            name: {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def step(self, share: float = 1.0) -> None:
        """Take one step at this share of the learning rate; parameters without a gradient are left unchanged."""
        num_steps = int(max(state["step"] for state in self._state.values()))
        share *= min(1.0, (num_steps + 1) / self._warm_up_steps)
        for (name, parameter), rate in zip(self._parameters.items(), self._rates(), strict=True):
            if parameter.grad is not None:
                state = self._state[name]
                moments = [state["exp_avg"]], [state["exp_avg_sq"]]
                _adamw([parameter], [parameter.grad], *moments, [], [state["step"]], lr=share * rate)

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer state by name, not copied; shapes [...] as the parameters'."""
        moments = {f"{name}.{kind}": value for name, state in self._state.items() for kind, value in state.items()}
        return moments | {f"{name}.rate": rate for name, rate in self._relative.items()}

    @torch.no_grad()
    def reset(self) -> None:
        """Zero all moments and relative rates."""
        for value in self.tensors().values():
            value.zero_()

    @torch.no_grad()
    def _rates(self) -> list[float]:
        """Return one rate per parameter; relative rates are computed before the first step only."""
        for name, rate in self._relative.items():
            if not rate:
                size = float(self._parameters[name].square().mean().sqrt())
                rate.fill_(self._rate * (size or 1.0))
        return [float(self._relative.get(name, self._rate)) for name in self._parameters]


class Descent:
    """Stateless optimizer: subtracts the gradients, which are Newton steps already."""

    gradient_norm = math.inf

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = parameters

    @torch.no_grad()
    def step(self, share: float = 1.0) -> None:
        """Subtract this share of the gradients."""
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            parameter.add_(parameter.grad, alpha=-share)

    def tensors(self) -> dict[str, Tensor]:
        """Optimizer state by name: empty."""
        return {}

    def reset(self) -> None:
        """No-op: there is no state."""


class OnlineTrainer:
    """Trains the training copy, and owns its optimizers. All calls come from the adaptation thread."""

    def __init__(
        self,
        model: SpecBlock,
        anchor: SpecBlock,
        embed: Embed,
        rows: Rows,
        *,
        rules: Rules,
        seed: int,
    ) -> None:
        """`model`: training copy in fp32; `anchor`: frozen, in fp32; `rows`: the anchor's output rows by vocabulary."""
        assert model.dtype == torch.float32, "the training copy must be fp32"
        model.requires_grad_(True)
        self._model = model
        self._rows = rows
        self.rules = rules
        self.seed = seed
        self._tuning = rules.tuning
        self._generator = torch.Generator().manual_seed(seed)
        self._objective = Objective(model, embed, ObjectiveSettings(rank_rows=_RANK_ROWS, blocks=rules.blocks))
        self._divergence = TextDivergence(anchor, embed, rows, anchors=_ANCHORS)
        # At most one update, so that the last step of the first one has the whole rate and can be judged.
        warm_up = min(self._tuning.warm_up_steps, self._tuning.full_steps)
        named = dict(model.named_parameters())
        heads = {name: named[name] for name in OUTPUT_LAYERS}
        self._trained: dict[Arm, dict[str, nn.Parameter]] = {"head": heads, "full": named}
        full = Adam(named, rate=rules.learning_rate, warm_up_steps=warm_up, relative=rules.relative)
        self._optimizers: dict[Arm, Adam | Descent] = {"head": Descent(heads), "full": full}

    def update(self, arm: Arm, samples: Sequence[TrainingSample], *, rate_share: float = 1.0) -> Pieces[UpdateReport]:
        """Train on these samples, one optimizer step per piece; a failed update restores all weights and moments.
        `rate_share` scales the arm's learning rate."""
        before, moments = _copies(self._trained[arm].values()), _copies(self._optimizers[arm].tensors().values())
        losses: list[dict[str, float]] = []
        seconds = 0.0
        try:
            _check_finite(before, "weights_not_finite")
            _check_finite(moments, "optimizer_not_finite")
            for terms in self._steps(arm, samples):
                yield
                began = time.perf_counter()
                losses.append(self._step(arm, terms(), rate_share))
                seconds += time.perf_counter() - began
            moved = self._clip_update(arm, before)
            outcome: Outcome = "applied"
        except BaseException as error:
            self._undo(arm, before, moments)
            if not isinstance(error, _Discard):
                raise
            outcome, moved = error.outcome, 0.0
        return UpdateReport(arm, outcome, seconds, tuple(losses), moved)

    def moments(self) -> dict[str, Tensor]:
        """Optimizer state tensors by arm and name, not copied; shapes [...] as the parameters'."""
        return {
            f"{arm}.{name}": value
            for arm, optimizer in self._optimizers.items()
            for name, value in optimizer.tensors().items()
        }

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load other weights, shapes [...] as in the drafter, and reset the optimizers."""
        write_weights(self._model, weights)
        for optimizer in self._optimizers.values():
            optimizer.reset()

    def tensors(self) -> dict[str, Tensor]:
        """Return weights and optimizer state for a later process; names and shapes [...] never change."""
        return {f"weights.{name}": value for name, value in weights_of(self._model).items()} | self.moments()

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the `tensors()` of an earlier process, with the same names and shapes [...]."""
        for name, value in self.tensors().items():
            value.copy_(tensors[name])
        self._model.set_vocabulary(self._model.d2t.clone())

    def _steps(self, arm: Arm, samples: Sequence[TrainingSample]) -> list[Callable[[], _Terms]]:
        """Return one function per optimizer step of an update, which computes the loss of that step."""
        labelled = [sample for sample in samples if sample.draft_labels.count]
        examples = [sample.example for sample in samples if sample.example is not None]
        if not (labelled if arm == "head" else examples):
            raise _Discard("nothing_to_learn")
        if arm == "full":
            return self._full_steps(examples)
        return [partial(self._head_terms, labelled) for _ in range(self._tuning.head_steps)]

    def _full_steps(self, examples: list[Example]) -> list[Callable[[], _Terms]]:
        """Plan passes through the texts, in random order, until there are enough steps."""
        examples = [example.within(example.length - example.prompt + PROMPT) for example in examples]
        steps: list[Callable[[], _Terms]] = []
        while len(steps) < self._tuning.full_steps:
            *first, last = self._dealt(examples)[: self._tuning.full_steps - len(steps)]
            steps += [*(partial(self._full_terms, texts) for texts in first), partial(self._anchored, last, len(first))]
        return steps

    def _head_terms(self, labelled: Sequence[TrainingSample]) -> _Terms:
        """Compute the loss on draft labels taken at even intervals from all samples."""
        device = self._model.d2t.device
        joined = DraftLabels(*map(torch.cat, zip(*(one.draft_labels.fields for one in labelled), strict=True)))
        ranked = _spread(joined.count, _RANK_ROWS)
        noise = Noise(
            seeds=torch.cat([one.noise.seeds for one in labelled])[ranked].to(device),
            temperatures=torch.cat([one.noise.temperatures for one in labelled])[ranked].to(device),
            positions=torch.cat([one.noise.positions for one in labelled])[ranked].to(device),
            warm=any(one.noise.warm for one in labelled),
        )
        with self._autocast():
            return head_loss(
                self._model,
                self._rows(self._model.d2t),
                joined.take(_spread(joined.count, _HEAD_ROWS)).to(device),
                joined.take(ranked).to(device),
                TreeNoise.of(noise, 1, self._model.d2t),
                anchor_weight=self.rules.anchor_weight,
            )

    def _dealt(self, examples: list[Example]) -> list[list[Example]]:
        """Group texts of similar length into batches, since padding costs as much as text, and shuffle the batches.
        Many small steps learn more than one large step, at the same cost."""
        size = self._tuning.step_texts
        by_length = sorted(examples, key=lambda example: example.length)
        batches = [by_length[first : first + size] for first in range(0, len(by_length), size)]
        order: list[int] = torch.randperm(len(batches), generator=self._generator).tolist()
        return [batches[index] for index in order]

    def _full_terms(self, examples: list[Example]) -> _Terms:
        with self._autocast():
            scores = self._objective(self._batch(examples), self._generator)
        return scores.draft_loss + scores.rank_loss, {"draft": scores.draft_loss, "rank": scores.rank_loss}

    def _anchored(self, examples: list[Example], steps_without: int) -> _Terms:
        """Compute the loss with the distance to the anchor. The distance costs as much as all other terms, so it is
        computed in one step per pass, on one random text, and weighted for the steps without it."""
        loss, terms = self._full_terms(examples)
        drawn = int(torch.randint(len(examples), (), generator=self._generator))
        with self._autocast():
            anchor = self._divergence(self._model, self._batch([examples[drawn]]))
        weight = self.rules.anchor_weight * (1 + steps_without)
        return loss + weight * anchor, {**terms, "anchor": anchor}

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._model.d2t.device.type, dtype=torch.bfloat16, enabled=self.rules.autocast)

    def _batch(self, examples: list[Example]) -> Batch:
        return Batch.of(examples, self._model.config.reach, self._model.d2t.device)

    def _step(self, arm: Arm, terms: _Terms, rate_share: float) -> dict[str, float]:
        """Take one optimizer step. Returns the terms of the loss before it."""
        optimizer, (loss, parts) = self._optimizers[arm], terms
        if not bool(torch.isfinite(loss)):
            raise _Discard("loss_not_finite")
        norm = clipped_gradients(loss, list(self._trained[arm].values()), optimizer.gradient_norm)
        if not bool(torch.isfinite(norm)):
            raise _Discard("gradient_not_finite")
        optimizer.step(share=rate_share)
        self._model.zero_grad(set_to_none=True)
        return {name: float(part.detach()) for name, part in parts.items()}

    @torch.no_grad()
    def _clip_update(self, arm: Arm, before: Sequence[Tensor]) -> float:
        """Clip the change of the weights, and check that all is finite. Returns the norm of the clipped change,
        relative to the norm of the weights."""
        after = [value.detach() for value in self._trained[arm].values()]
        _check_finite(after, "weights_not_finite")
        _check_finite(self._optimizers[arm].tensors().values(), "optimizer_not_finite")
        moved = _norm(new - old for new, old in zip(after, before, strict=True)) / _norm(before)
        if moved > self._tuning.update_norm:
            for new, old in zip(after, before, strict=True):
                new.copy_(old + (new - old) * (self._tuning.update_norm / moved))
        return min(moved, self._tuning.update_norm)

    @torch.no_grad()
    def _undo(self, arm: Arm, before: Sequence[Tensor], moments: Sequence[Tensor]) -> None:
        """Restore weights and optimizer; an optimizer that was not finite before the update is reset."""
        self._model.zero_grad(set_to_none=True)
        optimizer = self._optimizers[arm]
        changed = [*self._trained[arm].values(), *optimizer.tensors().values()]
        for value, old in zip(changed, [*before, *moments], strict=True):
            value.copy_(old)
        if not all_finite(moments):
            optimizer.reset()


def _spread(count: int, most: int) -> Tensor:
    return torch.linspace(0, count - 1, min(count, most)).long()


def _copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def _check_finite(tensors: Iterable[Tensor], outcome: Outcome) -> None:
    if not all_finite(tensors):
        raise _Discard(outcome)


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([torch.linalg.vector_norm(tensor) for tensor in tensors]).norm())
