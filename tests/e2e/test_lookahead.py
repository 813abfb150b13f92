"""Lookahead on the embedded model: the text of plain decoding, in fewer steps."""

from pathlib import Path

import pytest

from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.requests import SamplingParams
from tests.service.engine.harness import generate, greedy, request, sampled

PROMPTS = (
    "Write the months of the year, then write them again, then once more.",
    "Repeat five times: the cat sat on the mat and looked at the moon.",
)


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    folder: Path = tmp_path_factory.mktemp("state")
    settings = ServiceConfig(device="cpu", threads=1, state_dir=folder, budget_policy="fixed", drafter="lookahead")
    return assemble(settings)


@pytest.mark.slow
@pytest.mark.parametrize("params", [greedy(48), sampled(3, 48)], ids=["greedy", "sampled"])
def test_the_embedded_model_says_the_same_in_fewer_steps(assembly: Assembly, params: SamplingParams) -> None:
    texts = [assembly.tokenizer.render_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    asked = [request(str(number), text, params) for number, text in enumerate(texts)]
    found = generate(assembly.engine(assembly.drafter("lookahead"), FixedBudget(16)), *asked)
    expected = generate(assembly.engine(assembly.drafter("none"), FixedBudget(0)), *asked)
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in expected.items()}
    assert all(one.accepted > 0 for one in found.values())
