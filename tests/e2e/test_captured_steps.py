"""All that a step computes, captured by what cannot run Python again, gives the text of plain decoding."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafters.asking import AskGate
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.requests import SamplingParams
from tests.kernels.tensor_program import kernels, record
from tests.service.bench.parts import save_drafter
from tests.service.engine.harness import Generated, generate, greedy, request, sampled
from tests.tiny_models import random_prompts, tiny_model

torch.set_num_threads(1)

WAYS = {
    "greedy": greedy(24),
    "sampled": sampled(3, 24),
    "filtered": replace(sampled(4, 24), top_p=0.8, top_k=30),
    "penalties": replace(sampled(5, 24), frequency_penalty=0.4),
}


def settings(folder: Path, **values: object) -> ServiceConfig:
    given = {"model": str(folder), "device": "cpu", "load_dtype": "float32", "kv_cache": "32MiB", "threads": 1}
    sizes = {"max_model_len": 128, "max_sequences": 3, "max_budget": 20, "budget_policy": "fixed"}
    return ServiceConfig.model_validate(
        {**given, **sizes, "state_dir": folder / "state", "drafter": "memory", **values}
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assemble(settings(tiny_model("llama", tmp_path_factory.mktemp("tiny"))), graphs=False)


@pytest.fixture(scope="module")
def captured(plain: Assembly) -> Iterator[Assembly]:
    """The default drafter, which is always asked for everything."""
    folder = Path(plain.config.model)
    drafter = save_drafter(folder / "drafter", plain)
    config = settings(folder, drafter="memory+specblock", drafter_path=drafter, draft_blocks=2)
    with pytest.MonkeyPatch.context() as patch, kernels():
        patch.setattr("kernels.graph_runner.rerun", record)
        patch.setattr(AskGate, "ask", _always)
        yield assemble(config, graphs=True)


def _always(gate: AskGate, expected: float, *, can_answer: bool = True) -> bool:
    gate._step.situation = 0, False
    gate._step.asked.append((gate._gains.of(1, gate._step.situation), expected))
    return True


@pytest.mark.parametrize("params", WAYS.values(), ids=WAYS)
def test_captured_steps_give_the_text_of_plain_ones(
    plain: Assembly, captured: Assembly, params: SamplingParams
) -> None:
    """More texts than run at once, so that prompts are read beside trees."""
    asked = [request(str(n), [*prompt, *prompt], params) for n, prompt in enumerate(random_prompts(7, 20))]
    found = generate(captured.engine(policy=FixedBudget(20)), *asked)
    expected = generate(plain.engine(plain.drafter("none"), FixedBudget(0)), *asked)
    assert _tokens(found) == _tokens(expected)
    assert sum(one.accepted for one in found.values()) > 0


def test_captured_steps_verify_what_was_said(plain: Assembly, captured: Assembly) -> None:
    """Some texts are known to the end, some in part, some not."""
    asked = [request(str(n), prompt, sampled(n, 24)) for n, prompt in enumerate(random_prompts(3, 20))]
    expected = generate(plain.engine(plain.drafter("none"), FixedBudget(0)), *asked)
    again = [replace(one, replayed=(expected[str(n), 0].tokens[: 12 * n],)) for n, one in enumerate(asked)]
    found = generate(captured.engine(policy=FixedBudget(20)), *again)
    assert _tokens(found) == _tokens(expected)
    assert [found[str(n), 0].accepted >= least for n, least in enumerate((0, 10, 21))] == [True] * 3


def _tokens(generated: dict[tuple[str, int], Generated]) -> dict[tuple[str, int], list[int]]:
    return {key: one.tokens for key, one in generated.items()}
