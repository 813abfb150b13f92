"""The training loop: it learns, goes on exactly where it was killed, and survives gradients that are not numbers."""

import os
import socket
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from torch import nn

from drafters.network.model import SpecBlock
from drafters.training import fit
from drafters.training.corpus import Batch, Example, TrainingError, load_examples
from drafters.training.fit import (
    FitLoop,
    FitSettings,
    Length,
    Position,
    SavedRun,
    make_optimizer,
    rate_factor,
    save_state,
)
from drafters.training.objective import Objective, ObjectiveSettings, StepScores
from drafters.training.parallel import Ranks, join, local_device
from tests.drafters.network.parts import tiny_embedding
from tests.drafters.training.parts import BLOCK, HIDDEN, random_shard, trainable_drafter

SETTINGS = FitSettings(batch_tokens=120, warm_up_steps=2, rank_from_step=4, learning_rate=3e-3, autocast=False)
DESCRIBED = {"seed": 0}


@pytest.fixture
def examples(tmp_path: Path) -> list[Example]:
    random_shard(12).save(tmp_path / "a.safetensors")
    return load_examples([tmp_path / "a.safetensors"], max_length=512)


def objective_of(model: SpecBlock) -> Objective:
    return Objective(model, tiny_embedding(HIDDEN), ObjectiveSettings(rank_rows=32))


def trainer_of(
    model: SpecBlock,
    optimizer: torch.optim.Optimizer,
    position: Position | None = None,
    objective: fit.Objective | None = None,
) -> FitLoop:
    return FitLoop(
        model,
        objective or objective_of(model),
        optimizer,
        settings=SETTINGS,
        reach=2 * BLOCK,
        ranks=Ranks(),
        position=position or Position(),
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_the_loss_falls(examples: list[Example]) -> None:
    model = trainable_drafter()
    trainer = trainer_of(model, make_optimizer(model, SETTINGS))
    losses = [report.loss for report in trainer.run(examples, Length(steps=40))]
    assert len(losses) == 40
    assert sum(losses[-8:]) < sum(losses[:8]) - 1.0
    assert trainer.position.epoch > 1


def test_other_settings_and_damaged_files_are_refused(examples: list[Example], tmp_path: Path) -> None:
    model, file = trainable_drafter(), tmp_path / "fit.pt"
    optimizer = make_optimizer(model, SETTINGS)
    save_state(file, model, optimizer, Position(), described=DESCRIBED, notes={})
    with pytest.raises(TrainingError, match="seed was 0, is 1"):
        SavedRun.read(file).refuse_others({"seed": 1})
    with pytest.raises(TrainingError, match="target was None, is 'a'"):
        SavedRun.read(file).refuse_others({"seed": 0, "target": "a"})
    SavedRun.read(file).refuse_others(DESCRIBED)
    file.write_bytes(file.read_bytes()[:500])
    with pytest.raises(TrainingError, match="delete it"):
        SavedRun.read(file)


def test_the_rank_head_rests_until_its_step(examples: list[Example]) -> None:
    model = trainable_drafter()
    before = weights_of(model)
    trainer = trainer_of(model, make_optimizer(model, SETTINGS))
    for report in trainer.run(examples, Length(steps=5)):
        rests = all(torch.equal(before[n], v) for n, v in model.state_dict().items() if n.startswith("rank_head"))
        assert rests is (report.position.step <= 4)


class Poisoned:
    """An objective whose loss is no number at some steps."""

    def __init__(self, real: Objective, bad: set[int]) -> None:
        self._real = real
        self._bad = bad
        self._calls = 0

    def __call__(self, batch: Batch, generator: torch.Generator) -> StepScores:
        self._calls += 1
        scores = self._real(batch, generator)
        factor = float("inf") if self._calls - 1 in self._bad else 1.0
        return replace(scores, draft_loss=scores.draft_loss * factor)


def poisoned_trainer(model: SpecBlock, bad: set[int]) -> FitLoop:
    return trainer_of(model, make_optimizer(model, SETTINGS), objective=Poisoned(objective_of(model), bad))


def test_a_step_that_is_not_finite_is_left_out_and_counted(examples: list[Example]) -> None:
    model = trainable_drafter()
    trainer = poisoned_trainer(model, {2, 3})
    held = weights_of(model)
    for report in trainer.run(examples, Length(steps=6)):
        is_bad = report.position.step - 1 in {2, 3}
        assert same(held, weights_of(model)) is is_bad
        held = weights_of(model)
    assert trainer.position.skipped == 2
    assert trainer.position.skipped_in_a_row == 0


def test_a_run_that_only_diverges_ends(examples: list[Example]) -> None:
    trainer = poisoned_trainer(trainable_drafter(), set(range(100)))
    with pytest.raises(TrainingError, match="lower the learning rate"):
        list(trainer.run(examples, Length(steps=100)))


def test_the_end_that_comes_first_counts() -> None:
    assert Length(steps=10).fraction(5, 1e9) == 0.5
    assert Length(seconds=10.0).fraction(10**9, 5.0) == 0.5
    assert Length(steps=10, seconds=100.0).fraction(2, 90.0) == 0.9
    assert Length(steps=10).fraction(11, 0.0) == 1.0


def test_the_rate_rises_then_falls_to_its_rest() -> None:
    rising = [rate_factor(step, 0.0, warm_up_steps=4, least=0.1) for step in range(5)]
    assert rising == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rate_factor(100, 0.5, warm_up_steps=4, least=0.1) == pytest.approx(0.55)
    assert rate_factor(100, 1.0, warm_up_steps=4, least=0.1) == pytest.approx(0.1)


# Two processes train one drafter: the same weights on both, from different batches.

PARALLEL = FitSettings(batch_tokens=120, warm_up_steps=2, rank_from_step=2, learning_rate=3e-3, autocast=False)


def train(ranks: Ranks, model: SpecBlock, folder: Path, steps: int = 3) -> None:
    """Weights and losses go into the folder."""
    torch.set_num_threads(1)
    examples = load_examples([folder / "a.safetensors"], max_length=512)
    objective = Objective(model, tiny_embedding(HIDDEN), ObjectiveSettings(rank_rows=32))
    trainer = FitLoop(
        model,
        objective,
        make_optimizer(model, PARALLEL),
        settings=PARALLEL,
        reach=2 * BLOCK,
        ranks=ranks,
        position=Position(),
    )
    losses = [report.loss for report in trainer.run(examples, Length(steps=steps))]
    torch.save({"weights": dict(model.named_parameters()), "losses": losses}, folder / f"{ranks.rank}of{ranks.size}.pt")


def one_of_two(rank: int, folder: Path, port: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    model = trainable_drafter()
    with torch.no_grad():
        model.lm_head.weight.add_(float(rank))  # only the first process's start counts
    ranks = Ranks(torch.device("cpu"))
    train(ranks, model, folder)
    assert ranks.first(float(rank)) == 0.0
    tensor = torch.full((3,), float(rank))
    ranks.average([tensor, torch.ones(2, 2)])
    assert tensor.tolist() == [0.5, 0.5, 0.5]
    ranks.wait()
    ranks.leave()


@pytest.mark.slow
def test_two_processes_hold_the_same_weights(tmp_path: Path) -> None:
    random_shard(16).save(tmp_path / "a.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Both processes are forked from one that has imported what they need, and that has run nothing.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    both = [context.Process(target=one_of_two, args=(rank, tmp_path, port), daemon=True) for rank in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(timeout=120)
    assert [process.exitcode for process in both] == [0, 0]
    left, right = (torch.load(tmp_path / f"{rank}of2.pt") for rank in range(2))
    assert all(torch.equal(value, right["weights"][name]) for name, value in left["weights"].items())
    assert left["losses"] != right["losses"]
    start = dict(trainable_drafter(seed=0).named_parameters())
    assert not any(torch.equal(left["weights"][name], start[name]) for name in start if "norm" not in name)


def test_too_few_batches_for_all_processes_are_refused(tmp_path: Path) -> None:
    random_shard(2).save(tmp_path / "a.safetensors")
    crowd = Ranks()
    crowd.size = 3
    with pytest.raises(TrainingError, match="1 batches for 3 processes"):
        train(crowd, trainable_drafter(), tmp_path)


def test_without_torchrun_there_is_one_process() -> None:
    assert join(torch.device("cpu")).size == 1
    assert local_device(torch.device("cpu")) == torch.device("cpu")
