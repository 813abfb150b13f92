"""`check lossless` on a checkpoint of every family: no way of decoding changes a token."""

from itertools import product
from pathlib import Path

import pytest

from service.assembly import assemble
from service.bench.lossless import Case, Company, Way, check
from tests.conformance.checkpoints import Checkpoint, made, save
from tests.conformance.measures import small
from tests.service.bench.parts import save_drafter, settings_for, varied_prompts

WAYS = (Way("none", 0), Way("memory", 16), Way("random", 16), Way("specblock", 48), Way("memory+specblock", 16))
COMPANIES: tuple[Company, ...] = ("alone", "among 15", "short of slots")
CASES = [Case(temperature, "none", way, who, 64) for temperature, way, who in product((0.0, 1.0), WAYS, COMPANIES)]


def assert_lossless(checkpoint: Checkpoint, folder: Path, num_tokens: int) -> None:
    config = settings_for(save(made(checkpoint), folder, within=checkpoint.within)).model_copy(
        update={"unverified": True}
    )
    drafter = save_drafter(folder / "drafter", assemble(config))
    assembly = assemble(config.model_copy(update={"drafter_path": drafter}))
    result = check(assembly, varied_prompts(), num_tokens=num_tokens, cases=CASES)
    assert len(result.cases) >= len(CASES)
    assert result.first is None
    assert result.total.mismatched_tokens == 0
    assert result.total.accepted_tokens > 0
    assert result.total.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", small(), ids=str)
def test_a_family(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert_lossless(checkpoint, tmp_path, 21_000)
