"""Serving weights change between steps only, as a whole, under rising versions; a restore brings back exact bits."""

import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adaptation.checkpoint import SnapshotRing, folder_name
from adaptation.records import Damaged, NotStored
from adaptation.samples import example_of
from adaptation.weights import DrafterWeights, Prepare, in_place
from drafters.network.checkpoint import VOCABULARY, weights_of, write_weights
from drafters.network.model import SpecBlock
from drafters.training.corpus import Batch
from drafters.training.forward import TrainingForward
from tests.adaptation.drafts import same
from tests.adaptation.samples import EMBED, drafter, feedback


def weights_in(folder: Path, serving: SpecBlock, replica_dtype: torch.dtype | None = None) -> DrafterWeights:
    return DrafterWeights(
        weights_of(serving),
        serving.config,
        prepare=in_place(serving),
        snapshots=SnapshotRing(folder, size=4),
        train_device="cpu",
        replica_dtype=replica_dtype,
    )


@torch.no_grad()
def train(weights: DrafterWeights, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in weights.training.parameters():
        value.add_(0.1 * torch.randn(value.shape, generator=generator))


def publish(weights: DrafterWeights, seed: int) -> int:
    """Train, publish, and serve what was published. # -> its version"""
    train(weights, seed)
    version = weights.publish({})
    assert weights.between_steps() == version
    return version


def bits(model: SpecBlock) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in weights_of(model).items()}


def half_written(model: SpecBlock, failures: list[Exception]) -> Prepare:
    """As `in_place`, but the next writes raise in the middle."""

    def write(weights: Mapping[str, Tensor]) -> None:
        if failures:
            next(model.parameters()).copy_(weights[next(iter(dict(model.named_parameters())))])
            raise failures.pop()
        write_weights(model, weights)

    return lambda weights: partial(write, weights)


def test_a_swap_that_fails_in_the_middle_leaves_the_former_weights_whole(tmp_path: Path) -> None:
    serving, failures = drafter(), list[Exception]()
    weights = DrafterWeights(
        weights_of(serving),
        serving.config,
        prepare=half_written(serving, failures),
        snapshots=SnapshotRing(tmp_path, size=4),
        train_device="cpu",
    )
    first = publish(weights, 1)
    former = bits(serving)
    train(weights, 2)
    second = weights.publish({})
    failures.append(RuntimeError("planted"))
    with pytest.raises(RuntimeError, match="planted"):
        weights.between_steps()
    assert weights.version == first
    assert same(bits(serving), former)
    assert weights.between_steps() == second
    assert same(bits(serving), weights.latest.weights)


@torch.no_grad()
def says(model: SpecBlock) -> Tensor:
    text = example_of(feedback(3))
    assert text is not None
    batch = Batch.of([text], 8, "cpu")
    stream, first = TrainingForward(model, EMBED).first(batch, torch.tensor([[4, 6]]))
    return model.lm_head(torch.cat([stream.flatten(0, 1), first.states.flatten(0, 2)]))  # type: ignore[no-any-return]


def test_a_publish_makes_serving_say_what_the_training_copy_says(tmp_path: Path) -> None:
    serving = drafter()
    weights = weights_in(tmp_path, serving)
    assert torch.equal(says(serving), says(weights.training))
    train(weights, 1)
    before = bits(serving)
    assert weights.publish({"candidate": 2.0}) == 1
    assert (weights.version, weights.pending) == (0, True)
    assert same(bits(serving), before)
    assert weights.between_steps() == 1
    assert (weights.version, weights.origin, weights.pending) == (1, 1, False)
    assert torch.equal(says(serving), says(weights.training))
    assert torch.equal(says(weights.served()), says(serving))
    assert torch.equal(says(weights.served_in_full()), says(serving))


def test_the_parameters_stay_the_same_objects(tmp_path: Path) -> None:
    serving = drafter().to(torch.bfloat16)
    weights, places = weights_in(tmp_path, serving), {n: v.data_ptr() for n, v in serving.named_parameters()}
    publish(weights, 1)
    assert places == {name: value.data_ptr() for name, value in serving.named_parameters()}
    parameters = {name: value.detach().to(torch.bfloat16) for name, value in weights.training.named_parameters()}
    assert same(bits(serving), parameters | {VOCABULARY: weights.training.d2t})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restore_brings_back_exact_bits_under_a_new_version(tmp_path: Path, dtype: torch.dtype) -> None:
    serving = drafter().to(dtype)
    weights = weights_in(tmp_path, serving)
    known = {0: bits(serving)}
    for seed in (1, 2, 3):
        version = publish(weights, seed)
        known[version] = bits(serving)
    for target, version in ((1, 4), (3, 5), (0, 6), (2, 7)):
        restored = weights.restore(target)
        assert (restored.version, restored.origin) == (version, target)
        assert weights.between_steps() == version
        assert weights.origin == target
        assert same(bits(serving), known[target])


def test_publishes_that_are_taken_back_push_nothing_out_that_can_be_gone_back_to(tmp_path: Path) -> None:
    serving = drafter()
    weights = weights_in(tmp_path, serving)
    for seed in (1, 2):
        publish(weights, seed)
    good = bits(serving)
    for seed in range(6):
        taken_back = publish(weights, seed)
        weights.condemn()
        assert weights.restore_before(taken_back).origin == 2
        weights.between_steps()
        assert same(bits(serving), good)
    assert {1, 2} < set(weights.snapshots.versions)
    assert len(weights.snapshots.versions) == 4


def test_going_back_skips_what_was_condemned_or_cannot_be_trusted(tmp_path: Path) -> None:
    serving = drafter()
    weights, first = weights_in(tmp_path, serving), bits(serving)
    for seed in (1, 2, 3, 4):
        publish(weights, seed)
    weights.condemned.add(3)
    (tmp_path / folder_name(2) / "weights.safetensors").write_bytes(b"")
    assert weights.condemn() == 4
    restored = weights.restore_before(4)
    assert restored.origin == 1
    weights.between_steps()
    assert weights.condemn() == 1
    assert weights.restore_before(1).origin == 0
    weights.between_steps()
    assert same(bits(serving), first)
    weights.condemn()
    assert weights.condemned == {1, 3, 4}


def test_a_restore_overtakes_a_publish_that_waits(tmp_path: Path) -> None:
    serving = drafter()
    weights, first = weights_in(tmp_path, serving), bits(serving)
    train(weights, 1)
    weights.publish({})
    assert (weights.condemn(), weights.restore_before(1).version) == (1, 2)
    assert weights.between_steps() == 2
    assert same(bits(serving), first)


def test_a_full_disk_publishes_nothing(tmp_path: Path) -> None:
    serving = drafter()
    weights, before = weights_in(tmp_path / "ring", serving), bits(serving)
    (tmp_path / "ring").write_text("in the way")
    train(weights, 1)
    with pytest.raises(NotStored):
        weights.publish({})
    assert (weights.between_steps(), weights.newest) == (0, 0)
    assert same(bits(serving), before)


def test_a_version_that_is_not_there_is_not_restored(tmp_path: Path) -> None:
    weights = weights_in(tmp_path, drafter())
    with pytest.raises(Damaged):
        weights.restore(7)
    assert not weights.pending


def test_a_later_process_uses_no_version_twice(tmp_path: Path) -> None:
    weights = weights_in(tmp_path, drafter())
    train(weights, 1)
    weights.publish({})
    later = weights_in(tmp_path, drafter())
    later.resume(9, {1})
    assert later.restore(0).version == 10
    assert later.restore_before(9).origin == 0


def test_steps_never_see_two_versions(tmp_path: Path) -> None:
    """One thread steps and reads every parameter, another publishes as fast as it can."""
    serving, done = drafter(), threading.Event()
    weights = weights_in(tmp_path, serving)
    seen: list[tuple[int, set[float]]] = []

    def step() -> None:
        while not done.is_set():
            version = weights.between_steps()
            seen.append((version, {float(value.view(-1)[0]) for value in serving.parameters()}))

    engine = threading.Thread(target=step)
    engine.start()
    while len({version for version, _ in seen}) < 12:
        if not weights.pending:
            with torch.no_grad():
                for value in weights.training.parameters():
                    value.fill_(float(weights.newest + 1))
            weights.publish({})
    done.set()
    engine.join()
    served = [entry for entry in seen if entry[0]]
    assert all(values == {float(version)} for version, values in served)
    order = [version for version, _ in seen]
    assert order == sorted(order)
    assert set(order) == set(range(max(order) + 1))


def test_weights_that_somebody_brings_are_served_and_can_be_gone_back_to(tmp_path: Path) -> None:
    serving = drafter()
    weights, brought = weights_in(tmp_path, serving), bits(drafter(seed=5))
    train(weights, 1)
    weights.publish({})
    assert weights.adopt(brought) == 2
    assert weights.latest.replaced is None
    assert weights.between_steps() == 2
    assert weights.origin == 2
    assert same(bits(serving), brought)
    for value in brought.values():
        value.zero_()
    assert same(bits(weights.served()), bits(drafter(seed=5)))
    weights.restore(0)
    weights.between_steps()
    weights.restore(2)
    weights.between_steps()
    assert same(bits(serving), bits(drafter(seed=5)))


def test_drafters_are_scored_on_the_weights_that_serve_in_whatever_type_is_faster(tmp_path: Path) -> None:
    weights = weights_in(tmp_path, drafter().bfloat16(), torch.float32)
    train(weights, 1)
    wanted = {name: value.detach().bfloat16().float() for name, value in weights.training.named_parameters()}
    scored = bits(weights.candidate())
    assert {value.dtype for name, value in scored.items() if name != VOCABULARY} == {torch.float32}
    assert all(torch.equal(scored[name], value) for name, value in wanted.items())
    weights.publish({})
    assert all(torch.equal(bits(weights.served())[name], value) for name, value in wanted.items())
    assert {value.dtype for name, value in weights.latest.weights.items() if name != VOCABULARY} == {torch.bfloat16}


@pytest.mark.parametrize("place", ["_prepare", "_stage"])
def test_a_publish_that_breaks_does_not_stand_in_the_way_of_the_next(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken after its snapshot was stored, its version is taken on disk and must not be tried again."""

    def breaks(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    serving = drafter()
    weights, before = weights_in(tmp_path, serving), bits(serving)
    train(weights, 1)
    attempts: list[Callable[[], int]] = [lambda: weights.publish({}), lambda: weights.adopt(before)]
    for attempt in attempts:
        with monkeypatch.context() as patch:
            patch.setattr(weights, place, breaks)
            with pytest.raises(RuntimeError, match="on purpose"):
                attempt()
    assert (weights.newest, weights.between_steps(), weights.pending) == (0, 0, False)
    assert same(bits(serving), before)
    assert weights.publish({}) == weights.between_steps() == 3
    assert same(bits(serving), bits(weights.training))
    assert weights_in(tmp_path, drafter()).highest == 3
