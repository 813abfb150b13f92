"""Two processes train one drafter: the same weights on both, from different batches."""

import os
import socket
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from drafters.specblock.model import SpecBlock
from drafters.training.corpus import TrainingError, load_examples
from drafters.training.fit import FitLoop, FitSettings, Length, Position, make_optimizer
from drafters.training.objective import Objective, ObjectiveSettings
from drafters.training.parallel import Ranks, join, local_device
from tests.drafters.specblock.parts import tiny_embedding
from tests.drafters.training.parts import BLOCK, HIDDEN, random_shard, trainable_drafter

SETTINGS = FitSettings(batch_tokens=120, warm_up_steps=2, rank_from_step=2, learning_rate=3e-3, autocast=False)


def train(ranks: Ranks, model: SpecBlock, folder: Path, steps: int = 3) -> None:
    """Weights and losses go into the folder."""
    torch.set_num_threads(1)
    examples = load_examples([folder / "a.safetensors"], max_length=512)
    objective = Objective(model, tiny_embedding(HIDDEN), ObjectiveSettings(rank_rows=32))
    trainer = FitLoop(
        model,
        objective,
        make_optimizer(model, SETTINGS),
        settings=SETTINGS,
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
