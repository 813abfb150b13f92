"""A step neither synchronises with the device nor copies from it, except where a line says so."""

from pathlib import Path

import pytest

from tests.architecture.rules import ROOT, complaints, device_transfers, module_name, modules

# Start-up and measurement, which may wait for the device, and a reference that no device runs: each has a kernel there.
OUTSIDE_THE_STEP = frozenset(
    {
        "kernels.joint_tree",  # a tree grows as its values say
        "kernels.memory",
        "service.engine.measuring",  # the self-check, and the cost table
        "service.engine.shards",  # loads a part of the target
        "service.engine.weights",  # loads the target
    }
)
TRAINING = ("training", "checkpoint.py")


def in_the_step(path: Path) -> bool:
    parts = path.relative_to(ROOT).parts
    if module_name(path) in OUTSIDE_THE_STEP or parts[:2] == ("kernels", "cpu"):  # where the host computes itself
        return False
    return not set(TRAINING) & set(parts)


def test_no_unplanned_transfer() -> None:
    paths = [path for path in modules("kernels", "drafters", "service/engine") if in_the_step(path)]
    assert paths
    assert complaints(paths, device_transfers) == {}


def test_the_exceptions_exist() -> None:
    assert {module_name(path) for path in modules("kernels", "service/engine")} >= OUTSIDE_THE_STEP


@pytest.mark.parametrize(
    "source",
    [
        "n = mask.sum().item()",
        "rows = [t for t in tokens.tolist()]",
        "x = y.cpu()",
        "import torch\ntorch.cuda.synchronize()",
        "import torch.cuda as c\nc.synchronize(0)",
        "# planned transfer\nx = y.cpu()",
        "n = int(self.ends.max())",
        "if bool((x > 0).any()): ...",
    ],
)
def test_a_transfer_is_seen(source: str) -> None:
    assert len(device_transfers(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "x = y.cpu()  # planned transfer: emitted tokens",
        "x = (\n    y.tolist()  # planned transfer\n)",
        "item = row.items()",
        "n = int(ends.max())  # planned transfer",
        "n = int(text.count('a')) + float(seconds[0])",
    ],
)
def test_a_planned_transfer_passes(source: str) -> None:
    assert device_transfers(source) == []
