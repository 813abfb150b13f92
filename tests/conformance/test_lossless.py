"""`check lossless` on a checkpoint of every family: no way of decoding changes a token, and neither does learning."""

from functools import partialmethod
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from adaptation.checkpoint import SnapshotRing
from adaptation.weights import DrafterWeights
from service.assembly import Assembly, assemble
from service.bench.lossless import Case, Company, Way, check
from service.drafter import load_drafter
from tests.adaptation.test_weights import publish
from tests.conformance.checkpoints import CHECKPOINTS, Checkpoint, made, save
from tests.conformance.measures import small
from tests.service.bench.parts import save_drafter, settings_for, varied_prompts
from tests.service.engine.test_learning import Heard

WAYS = (Way("none", 0), Way("memory", 16), Way("random", 16), Way("specblock", 48), Way("memory+specblock", 16))
COMPANIES: tuple[Company, ...] = ("alone", "among 15", "short of slots")
CASES = [Case(temperature, "none", way, who, 64) for temperature, way, who in product((0.0, 1.0), WAYS, COMPANIES)]
PUBLISHES_EVERY = 8  # steps
OTHERS = [one for one in CHECKPOINTS if one.family == "Gemma 4" or one.kind == "longrope"]  # whose layers differ
FAMILIES = list(dict.fromkeys([*small(), *OTHERS]))


class Publishing(Heard):
    """Learning that publishes other weights of the drafter every few steps, in the middle of answers."""

    def __init__(self, assembly: Assembly, folder: Path) -> None:
        super().__init__()
        source: Any = load_drafter(assembly.drafter_folder, assembly.loaded, blocks=2)
        serving: Any = assembly.weights
        served: Any = {"prepare": serving.network.prepare, "snapshots": SnapshotRing(folder, size=2)}
        self.weights = DrafterWeights(source.weights, serving.network.config, train_device="cpu", **served)

    def between_steps(self, *, idle: bool) -> int:
        due = super().between_steps(idle=idle) % PUBLISHES_EVERY == 0
        return publish(self.weights, self.version) if due else self.weights.version


def assert_lossless(checkpoint: Checkpoint, folder: Path, num_tokens: int) -> None:
    saved = save(made(checkpoint), folder, within=checkpoint.within)
    config = settings_for(saved).model_copy(update={"unverified": True})
    drafter = save_drafter(folder / "drafter", assemble(config))
    assembly = assemble(config.model_copy(update={"drafter_path": drafter}))
    hooks = Publishing(assembly, folder / "versions")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Assembly, "engine", partialmethod(Assembly.engine, learning=hooks))
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


def test_few_states_suffice(tmp_path: Path) -> None:
    recurrent = next(one for one in CHECKPOINTS if one.family == "LFM2")
    few = {"max_sequences": 3, "max_budget": 8, "budget_policy": "fixed"}
    assembly = assemble(settings_for(save(made(recurrent), tmp_path)).model_copy(update=few))
    cases = [Case(0.0, "none", Way("memory", 48), company, 64) for company in ("alone", "among 15")]
    result = check(assembly, varied_prompts(), num_tokens=200, answer_tokens=16, cases=cases)
    assert result.first is None
    assert result.total.accepted_tokens > 100
