"""Updates learn, are bounded, are the same twice, and leave no trace when anything is not finite."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div

from adaptation import trainer as trainer_module
from adaptation.config import Tuning
from adaptation.evaluator import untrained_rows
from adaptation.policy import ARMS, Arm, Pace
from adaptation.samples import TrainingSample, training_sample
from adaptation.timing import completed
from adaptation.trainer import Adam, OnlineTrainer, Rules, UpdateReport
from drafters.coupling import TreeNoise
from drafters.network.checkpoint import weights_of
from drafters.network.heads import propose
from drafters.network.model import SpecBlock
from drafters.protocol import Noise
from drafters.trained_kinds import TRAINED_KINDS, trained_kind
from drafters.training.fit import bf16_is_faster
from drafters.training.output_layers import OUTPUT_LAYERS, anchor_divergence, newton_logits, target_divergence
from tests.adaptation.drafts import same
from tests.adaptation.samples import EMBED, HEAD, drafter, sampled, samples, vocabulary
from tests.drafters.network.parts import serving, tiny_drafter

TOKEN = int(vocabulary()[0][5])


def test_a_step_is_that_of_torchs_own_optimizer() -> None:
    ours, theirs = ({name: torch.nn.Parameter(torch.randn(7, 5)) for name in "ab"} for _ in range(2))
    for name, parameter in theirs.items():
        parameter.data = ours[name].detach().clone()
    adam = Adam(ours, rate=0.01)
    expected = torch.optim.AdamW(theirs.values(), lr=0.01, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    for names in ("a", "ab", "b"):  # a parameter without a gradient stays
        for name in ours:
            gradient = torch.randn(7, 5) if name in names else None
            ours[name].grad = theirs[name].grad = gradient
        adam.step()
        expected.step()
        assert same(ours, theirs)


def of_kind(kind: str) -> SpecBlock:
    model = tiny_drafter(kind=kind, **trained_kind(kind).shape)
    model.set_vocabulary(vocabulary()[0])
    return model


def trainer(
    *,
    rate: float | None = None,
    anchor_weight: float = 0.01,
    autocast: bool = False,
    steps: int = 4,
    kind: str = "specblock",
    relative: bool = False,
    size: float = 1.0,
    **tuned: Any,
) -> tuple[OnlineTrainer, SpecBlock]:
    numbers = {"step_texts": 64, "warm_up_steps": 1, "update_norm": 1.0, "head_steps": steps, "full_steps": steps}
    rules = Rules(
        relative=relative,
        blocks=trained_kind(kind).config.trained_blocks,
        learning_rate=rate or 0.01,
        anchor_weight=anchor_weight,
        autocast=autocast,
        tuning=Tuning(**{**numbers, **tuned}),
    )
    model = drafter() if kind == "specblock" else of_kind(kind)
    anchor = copy.deepcopy(model)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(size)
    return OnlineTrainer(model, anchor, EMBED, untrained_rows(anchor, HEAD), rules=rules, seed=0), model


def state_of(trained: OnlineTrainer) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in trained.tensors().items()}


def anchor_loss(report: UpdateReport, step: int) -> float:
    return report.losses[step]["anchor"]


@pytest.mark.parametrize(("kind", "autocast"), [("specblock", True), *((kind, False) for kind in TRAINED_KINDS)])
@pytest.mark.parametrize("arm", ARMS)
def test_an_update_lowers_the_loss_on_its_own_data(arm: Arm, kind: str, autocast: bool) -> None:
    trained, _ = trainer(steps=12, autocast=autocast, kind=kind)
    report = completed(trained.update(arm, samples(4, token=TOKEN)))
    assert report.outcome == "applied"
    assert report.seconds > 0
    assert 0 < report.moved < 1
    assert report.losses[-1]["draft"] < 0.8 * report.losses[0]["draft"]
    assert report.losses[-1]["rank"] < report.losses[0]["rank"]
    assert abs(anchor_loss(report, 0)) < 1e-5 < anchor_loss(report, -1)


@pytest.mark.parametrize("others", [0, 2])
def test_at_a_temperature_the_rank_head_learns_the_ranks_that_it_serves_with(others: int) -> None:
    """The draft head knows the target, so the noise that samples a token ranks it first. Without the noise it has any
    rank: from such features the head would learn that the first is right three times in ten."""
    trained, model = trainer(steps=60)
    at_zero = samples(others, token=TOKEN)
    completed(trained.update("head", [training_sample(sampled(seed), most_rejected=64) for seed in range(6)] + at_zero))
    fresh = sampled(77)
    positions = fresh.query.offset + fresh.draft_labels.positions
    noise = TreeNoise.of(Noise.of_text(77, 1.0, positions - 1), 1, model.d2t)
    states = fresh.draft_labels.states[:, None, None]
    proposal = propose(serving(model), states, torch.ones(states.shape[:3], dtype=torch.int64), noise)
    assert float(proposal.predicted[..., 0].mean()) > 0.6
    assert float((proposal.tokens[:, 0, 0, 0] == fresh.draft_labels.tokens).float().mean()) > 0.8


def test_the_rate_has_risen_when_the_first_update_after_a_reset_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each update can be judged, were every one of them followed by a reset."""
    trained, model = trainer(warm_up_steps=8, full_steps=4)
    rates: list[float] = []
    take_step = trainer_module._adamw

    def noting(*given: Any, lr: float) -> None:
        rates.append(lr)
        take_step(*given, lr=lr)

    monkeypatch.setattr(trainer_module, "_adamw", noting)
    for _ in range(2):
        completed(trained.update("full", samples(4)))
        completed(trained.update("full", samples(4)))
        trained.load(weights_of(model))
    risen = trained.rules.learning_rate
    by_step = rates[:: len(rates) // 16]
    assert by_step == pytest.approx([risen * share for share in [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0] * 2])


@pytest.mark.parametrize("arm", ARMS)
def test_an_update_may_take_a_share_of_the_rate(arm: Arm) -> None:
    whole, careful = (trainer(steps=1)[0] for _ in range(2))
    taught = samples(4, token=TOKEN)
    moved = completed(careful.update(arm, taught, rate_share=0.25)).moved
    assert moved == pytest.approx(completed(whole.update(arm, taught)).moved / 4, rel=0.01)


def test_a_head_update_moves_output_layers_only_and_of_the_draft_head_the_rows_of_likely_tokens() -> None:
    trained, model = trainer()
    before, (sample,) = copy.deepcopy(model), samples(1)
    few = replace(sample, draft_labels=sample.draft_labels.take(torch.arange(2)))
    completed(trained.update("head", [few]))
    assert moved_by(model, before) == set(OUTPUT_LAYERS)
    rows = (model.lm_head.weight != before.lm_head.weight).any(1).nonzero()[:, 0]
    likely = model.t2d[few.draft_labels.top_ids[:, :16].long()]
    assert {0, *rows.tolist()} == {0, *likely.clamp(min=0).flatten().tolist()}
    completed(trained.update("full", [few]))
    assert moved_by(model, before) > set(OUTPUT_LAYERS)


def moved_by(model: SpecBlock, before: SpecBlock) -> set[str]:
    old = dict(before.named_parameters())
    return {name for name, value in model.named_parameters() if not torch.equal(value, old[name])}


def test_the_anchor_holds_a_drafter_back() -> None:
    free, tied = (trainer(anchor_weight=weight, steps=12)[0] for weight in (0.0, 10.0))
    taught = samples(4, token=TOKEN)
    for arm in ARMS:
        far, near = completed(free.update(arm, taught)), completed(tied.update(arm, taught))
        assert anchor_loss(near, -1) < anchor_loss(far, -1)


def test_the_distance_to_the_anchor_is_taken_each_time_that_the_texts_are_gone_through() -> None:
    trained, _ = trainer(step_texts=2, full_steps=8)
    taken = ["anchor" in losses for losses in completed(trained.update("full", samples(5))).losses]
    assert taken == [False, False, True] * 2 + [False, True]


@pytest.mark.parametrize("arm", ARMS)
def test_an_update_moves_no_further_than_its_bound(arm: Arm) -> None:
    trained, model = trainer(update_norm=0.001)
    weights = {name: value.detach() for name, value in model.named_parameters()}
    names = [name for name in weights if arm == "full" or name in OUTPUT_LAYERS]
    before = {name: weights[name].clone() for name in names}
    report = completed(trained.update(arm, samples(4)))
    moved = math.sqrt(sum(float((weights[name] - before[name]).square().sum()) for name in names))
    size = math.sqrt(sum(float(value.square().sum()) for value in before.values()))
    assert report.moved == 0.001
    assert moved / size == pytest.approx(0.001, rel=1e-3)


def test_the_same_lessons_give_the_same_bits() -> None:
    one, other = trainer()[0], trainer()[0]
    for arm in (*ARMS, *ARMS):
        assert completed(one.update(arm, samples(4))).losses == completed(other.update(arm, samples(4))).losses
    assert same(one.tensors(), other.tensors())


@pytest.mark.parametrize("relative", [False, True])
def test_a_resumed_trainer_goes_on_to_the_bit(relative: bool) -> None:
    """Also one that was built around other weights, to which its rates were relative."""
    going, resumed = trainer(relative=relative)[0], trainer(relative=relative, size=50.0)[0]
    completed(going.update("full", samples(4)))
    completed(going.update("full", samples(3)))
    resumed.load_tensors(state_of(going))
    resumed._generator.set_state(going._generator.get_state())
    completed(going.update("full", samples(2)))
    completed(resumed.update("full", samples(2)))
    assert same(going.tensors(), resumed.tensors())


def broken_loss(trained: OnlineTrainer, model: SpecBlock, arm: Arm) -> list[TrainingSample]:
    taught = samples(4)
    for values in (taught[2].draft_labels.states, taught[2].example.features if taught[2].example else torch.empty(0)):
        values[-3:].fill_(math.nan)
    return taught


def broken_gradient(trained: OnlineTrainer, model: SpecBlock, arm: Arm) -> list[TrainingSample]:
    model.lm_head.weight.register_hook(lambda gradient: gradient * math.inf)
    return samples(4)


def broken_optimizer(trained: OnlineTrainer, model: SpecBlock, arm: Arm) -> list[TrainingSample]:
    trained.tensors()[f"{arm}.lm_head.weight.exp_avg"][3, 4] = math.nan
    return samples(4)


def broken_later(trained: OnlineTrainer, model: SpecBlock, arm: Arm) -> list[TrainingSample]:
    """The first step is fine."""
    calls: list[int] = []

    def after_one(gradient: Tensor) -> Tensor:
        calls.append(1)
        return gradient if len(calls) < 2 else gradient * math.nan

    model.lm_head.weight.register_hook(after_one)
    return samples(4)


BROKEN = {
    broken_loss: "loss_not_finite",
    broken_gradient: "gradient_not_finite",
    broken_later: "gradient_not_finite",
}


@pytest.mark.parametrize(
    ("arm", "breaks", "outcome"),
    [
        *((arm, *broken) for arm in ARMS for broken in BROKEN.items()),
        ("full", broken_optimizer, "optimizer_not_finite"),  # that of a head update has no state
    ],
)
def test_what_is_not_finite_leaves_no_trace(
    arm: Arm, breaks: Callable[[OnlineTrainer, SpecBlock, Arm], list[TrainingSample]], outcome: str
) -> None:
    trained, model = trainer()
    completed(trained.update("head", samples(4)))
    completed(trained.update("full", samples(4)))
    before = state_of(trained)
    report = completed(trained.update(arm, breaks(trained, model, arm)))
    assert (report.outcome, report.applied, report.moved) == (outcome, False, 0.0)
    after = trained.tensors()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    if breaks is broken_optimizer:  # there is nothing good to go back to
        assert changed == {name for name in before if name.startswith(f"{arm}.")}
        assert all(not after[name].any() for name in changed)
    else:
        assert changed == set()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_broken_weight_is_no_update() -> None:
    trained, model = trainer()
    weights = {name: value.detach() for name, value in model.named_parameters()}
    weights["rank_head.2.weight"][0] = math.nan
    assert completed(trained.update("head", samples(4))).outcome == "weights_not_finite"


@pytest.mark.parametrize("arm", ARMS)
def test_an_exception_leaves_no_trace(arm: Arm) -> None:
    trained, model = trainer()
    before = state_of(trained)

    def breaks(gradient: Tensor) -> Tensor:
        raise RuntimeError("broken on purpose")

    model.lm_head.weight.register_hook(breaks)
    with pytest.raises(RuntimeError, match="on purpose"):
        completed(trained.update(arm, samples(4)))
    assert same(before, trained.tensors())


@pytest.mark.parametrize("arm", ARMS)
def test_an_update_can_be_abandoned_between_steps(arm: Arm) -> None:
    trained, _ = trainer()
    before, pieces = state_of(trained), trained.update(arm, samples(4))
    for _ in range(3):
        next(pieces)
    assert not same(before, trained.tensors()), "two steps were taken"
    pieces.close()
    assert same(before, trained.tensors())


@pytest.mark.parametrize("arm", ARMS)
def test_no_lesson_is_no_update(arm: Arm) -> None:
    trained, _ = trainer()
    before = state_of(trained)
    assert completed(trained.update(arm, [])).outcome == "nothing_to_learn"
    assert same(before, trained.tensors())


def test_other_weights_come_without_memory() -> None:
    trained, model = trainer()
    completed(trained.update("full", samples(4)))
    other = drafter(seed=3)
    trained.load(weights_of(other))
    assert same(weights_of(model), weights_of(other))
    assert not any(value.any() for name, value in trained.tensors().items() if not name.startswith("weights."))


def test_it_begins_carefully_and_is_bold_when_traffic_has_changed() -> None:
    pace = Pace()
    assert [pace.share(arm) for arm in ARMS] == [0.5, 0.5]
    pace.traffic_changed()
    assert [pace.share(arm) for arm in ARMS] == [1.0, 1.0]


@pytest.mark.parametrize(("arm", "other"), [("head", "full"), ("full", "head")])
def test_each_arm_has_its_own_within_bounds(arm: Arm, other: Arm) -> None:
    pace = Pace()
    seen = [pace.share(arm)]
    for _ in range(10):
        pace.clearly_worse(arm)
        seen.append(pace.share(arm))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] == 0.25
    for _ in range(10):
        pace.published(arm)
    assert (pace.share(arm), pace.share(other)) == (1.0, 0.5)


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("bf16", "fp32", "faster"),
    [
        ([1.0], [2.0], True),
        ([2.0], [1.0], False),
        ([9.0, 1.0], [2.0, 3.0], True),  # one hiccup decides nothing
        ([2.0, 3.0], [9.0, 1.0], False),
    ],
)
def test_the_best_of_several_times_decides(bf16: list[float], fp32: list[float], faster: bool) -> None:
    times = {torch.bfloat16: cycle(bf16), torch.float32: cycle(fp32)}
    assert bf16_is_faster(CPU, lambda dtype: next(times[dtype])) is faster


def test_other_devices_than_cpus_are_not_asked() -> None:
    def refuses(dtype: torch.dtype) -> float:
        raise AssertionError("a device other than a CPU is not measured")

    assert bf16_is_faster(torch.device("cuda"), refuses)


# Divergences against torch's own.


def test_the_divergence_from_the_anchor_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = torch.randn(2, 7, 64, generator=generator)
    expected = kl_div(theirs.log_softmax(-1), ours.log_softmax(-1), reduction="batchmean", log_target=True)
    assert torch.allclose(anchor_divergence(ours, theirs), expected)
    assert anchor_divergence(ours, ours) == 0


def test_the_divergence_from_the_target_is_torchs_where_all_tokens_can_be_drafted() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, target = torch.randn(2, 7, 64, generator=generator)
    ids = torch.stack([torch.randperm(64, generator=generator) for _ in range(7)])
    logs = target.log_softmax(-1).gather(1, ids)
    expected = kl_div(ours.log_softmax(-1), target.log_softmax(-1), reduction="batchmean", log_target=True)
    assert torch.allclose(target_divergence(ours.log_softmax(-1), ids, logs), expected, atol=1e-6)


def test_a_token_that_cannot_be_drafted_teaches_nothing() -> None:
    log_q, logs = torch.zeros(1, 4).log_softmax(-1), torch.tensor([[0.5, 0.5]]).log()
    half = 0.5 * torch.tensor(0.5 / 0.25).log()
    assert torch.allclose(target_divergence(log_q, torch.tensor([[2, -1]]), logs), half)
    assert target_divergence(log_q, torch.tensor([[-1, -1]]), torch.tensor([[-torch.inf, 0.0]])) == 0


def test_a_step_of_an_output_layer_moves_each_rows_logits_by_what_is_wrong_with_them() -> None:
    """Though the rows have nearly all in common, by which a plain gradient would move them alike."""
    generator = torch.Generator().manual_seed(0)
    inputs = 10.0 + torch.randn(5, 64, generator=generator)
    weight = torch.randn(9, 64, generator=generator, requires_grad=True)
    wrong = torch.randn(5, 9, generator=generator)
    wrong -= wrong.mean(0)
    logits = newton_logits(inputs, weight)
    assert torch.equal(logits, inputs @ weight.T)
    (step,) = torch.autograd.grad(logits, [weight], wrong)
    products = inputs @ inputs.T
    damped = products + 0.3 * products.diagonal().mean() * torch.eye(5)
    assert torch.allclose(inputs @ step.T, products @ torch.linalg.solve(damped, wrong), atol=1e-4)


def test_rows_are_the_anchors_where_it_has_them_and_the_targets_elsewhere() -> None:
    deployed = drafter()
    rows = untrained_rows(deployed, HEAD)
    assert torch.equal(rows(deployed.d2t), deployed.lm_head.weight)
    foreign = (deployed.t2d < 0).nonzero()[:3, 0]
    mixed = torch.cat([foreign, deployed.d2t.flip(0)[3:]])
    assert torch.equal(rows(mixed)[:3], HEAD[foreign])
    assert torch.equal(rows(mixed)[3:], deployed.lm_head.weight.flip(0)[3:])
    assert torch.equal(untrained_rows(deployed, None)(deployed.d2t), deployed.lm_head.weight)
