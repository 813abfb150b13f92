"""`check lossless` on a checkpoint of every family: no way of decoding changes a token, and neither does learning."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from adaptation.checkpoint import SnapshotRing
from adaptation.weights import DrafterWeights
from drafters.feedback import Query
from service.assembly import Assembly, assemble
from service.bench.lossless import Case, Company, Way, check
from service.drafter import load_drafter
from service.engine.engine import Engine
from service.engine.stats import StepStats
from service.observability.guard import Guard
from tests.adaptation.test_weights import publish
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made, save
from tests.conformance.measures import small
from tests.service.bench.parts import save_drafter, settings_for, varied_prompts

WAYS = (Way("none", 0), Way("memory", 16), Way("random", 16), Way("specblock", 48), Way("memory+specblock", 16))
COMPANIES: tuple[Company, ...] = ("alone", "among 15", "short of slots")
CASES = [Case(temperature, "none", way, who, 64) for temperature, way, who in product((0.0, 1.0), WAYS, COMPANIES)]
PUBLISHES_EVERY = 8  # steps
OTHERS = [one for one in CHECKPOINTS if one.family == "Gemma 4" or one.kind == "longrope"]  # whose layers differ
FAMILIES = list(dict.fromkeys([*small(), *OTHERS]))


class Publishing:
    """Learning that publishes other weights of the drafter every few steps, in the middle of answers."""

    def __init__(self, assembly: Assembly, folder: Path) -> None:
        source = load_drafter(assembly.drafter_folder, assembly.loaded, blocks=2)
        assert source is not None
        assert assembly.weights is not None
        network = assembly.weights.network
        snapshots = SnapshotRing(folder, size=2)
        self.weights = DrafterWeights(
            source.weights, network.config, prepare=network.prepare, snapshots=snapshots, train_device="cpu"
        )
        self.guard, self._steps = Guard(), 0

    def between_steps(self) -> int:
        self._steps += 1
        return self.weights.version if self._steps % PUBLISHES_EVERY else publish(self.weights, self._steps)

    def stepped(self, stats: StepStats) -> bool:
        return True

    def ended(self, query: Query) -> None:
        pass


@contextmanager
def learning(hooks: Publishing) -> Iterator[None]:
    """Within, every engine learns."""
    engine = Assembly.engine

    def learns(assembly: Assembly, *parts: Any, **others: Any) -> Engine:
        return engine(assembly, *parts, **{**others, "learning": hooks})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assembly, "engine", learns)
        yield


def assert_lossless(checkpoint: Checkpoint, folder: Path, num_tokens: int) -> None:
    config = settings_for(save(made(checkpoint), folder, within=checkpoint.within)).model_copy(
        update={"unverified": True}
    )
    drafter = save_drafter(folder / "drafter", assemble(config))
    assembly = assemble(config.model_copy(update={"drafter_path": drafter}))
    hooks = Publishing(assembly, folder / "versions")
    with learning(hooks):
        result = check(assembly, varied_prompts(), num_tokens=num_tokens, cases=CASES)
    assert not hooks.guard.errors
    assert hooks.weights.version >= len(CASES)
    assert len(result.cases) >= len(CASES)
    assert result.first is None
    assert result.total.mismatched_tokens == 0
    assert result.total.accepted_tokens > 0
    assert result.total.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", FAMILIES, ids=str)
def test_a_family(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert_lossless(checkpoint, tmp_path, 21_000)
