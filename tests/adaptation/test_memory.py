from pathlib import Path

import pytest
import torch

from adaptation.memory import Memory
from tests.adaptation.drafts import same, tensors_of

pytestmark = pytest.mark.usefixtures("impatient")


def test_what_was_saved_is_remembered(tmp_path: Path) -> None:
    Memory(tmp_path).save(newest=7, origin=5, condemned={6, 2}, parts={"policy": {"num_waiting": 3}})
    remembered = Memory(tmp_path).load()
    assert (remembered.newest, remembered.origin, remembered.condemned) == (7, 5, {2, 6})
    assert remembered.parts == {"policy": {"num_waiting": 3}}
    assert remembered.complaints == ()


def test_a_first_start_remembers_nothing(tmp_path: Path) -> None:
    remembered = Memory(tmp_path / "new").load()
    assert (remembered.newest, remembered.origin, remembered.condemned, remembered.parts) == (0, 0, set(), {})


def test_a_damaged_file_falls_back_to_the_one_before(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    for newest in (1, 2):
        memory.save(newest=newest, origin=newest, condemned=set(), parts={})
    path = tmp_path / "learner.json"
    path.write_bytes(path.read_bytes()[:-4])
    remembered = memory.load()
    assert (remembered.newest, len(remembered.complaints)) == (1, 1)


@pytest.mark.parametrize("damage", [False, True])
def test_the_training_copy_is_that_of_the_weights_that_serve(tmp_path: Path, damage: bool) -> None:
    memory = Memory(tmp_path)
    for origin in (1, 1, 2):
        memory.save_training(tensors_of(origin), origin=origin)
    like = tensors_of(0)
    found = memory.load_training(like, origin=2)
    assert found is not None
    assert same(found, tensors_of(2))
    assert memory.load_training(like, origin=3) is None
    assert len(list((tmp_path / "training").iterdir())) == 2
    if damage:
        newest = max((tmp_path / "training").iterdir()) / "weights.safetensors"
        newest.write_bytes(newest.read_bytes()[:-1] + b"\0")
    older = memory.load_training(like, origin=1)
    assert older is not None
    assert same(older, tensors_of(1))
    assert (memory.load_training(like, origin=2) is None) == damage


def test_a_copy_of_another_drafter_does_not_fit(tmp_path: Path) -> None:
    memory = Memory(tmp_path)
    memory.save_training(tensors_of(1), origin=1)
    assert memory.load_training({"head.weight": torch.zeros(1)}, origin=1) is None
