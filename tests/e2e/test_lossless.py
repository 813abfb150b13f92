"""Number one of all tests: every way of decoding gives the text of plain decoding, token by token.

Sixty thousand tokens on tiny models in fp32, most of them on the fastest one. The slow tests: a million by every family
and kind of drafter, and the embedded model as it is served.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from drafters.asking import AskGate
from drafters.trained_kinds import TRAINED_KINDS, trained_kind
from service.assembly import Assembly, assemble
from service.bench.lossless import BUILT_IN, check
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.engine.requests import SamplingParams
from service.text.prompts import read_prompt_set
from tests.kernels.tensor_program import kernels, record
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, varied_prompts
from tests.service.engine.harness import Generated, always_ask, generate, greedy, request, sampled
from tests.tiny_models import FAMILIES, random_prompts, tiny_model

FEW_CASES = 10  # of which all may have had room
MANY_TOKENS = 1_000_000
FAMILY_SHARE, KIND_SHARE = 0.8 / len(FAMILIES), 0.2 / len(TRAINED_KINDS)
EMBEDDED_TOKENS = 100_000
Prompts = Sequence[Sequence[int]]
Tell = Callable[..., None]
Sized = Callable[[int], int]


def assert_lossless(
    assembly: Assembly, prompts: Prompts, num_tokens: int, seed: int = 0, *, tell: Tell = lambda **_: None
) -> None:
    assert assembly.numerics == "exact"
    result = check(assembly, prompts, num_tokens=num_tokens, seed=seed)
    total = result.total
    tell(
        tokens=total.tokens_compared,
        mismatched_tokens=total.mismatched_tokens,
        cases=len(result.cases),
        accepted_tokens=total.accepted_tokens,
        preemptions=total.preemptions,
    )
    assert result.first is None
    assert total.mismatched_tokens == 0
    assert total.tokens_compared >= num_tokens
    assert total.preemptions > 0 or len(result.cases) < FEW_CASES


def target_of(family: str, folder: Path) -> Path:
    return save_two_layers(folder) if family == "llama" else tiny_model(family, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family(family: str, tmp_path: Path) -> None:
    assert_lossless(assembled(target_of(family, tmp_path)), varied_prompts(), 2_000, FAMILIES.index(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_tokens_of_a_family(family: str, tmp_path: Path, sized: Sized, tell: Tell) -> None:
    num_tokens = int(FAMILY_SHARE * sized(MANY_TOKENS))
    assert_lossless(assembled(target_of(family, tmp_path)), varied_prompts(), num_tokens, 100, tell=tell)


@pytest.mark.slow
@pytest.mark.parametrize("kind", TRAINED_KINDS)
def test_many_tokens_by_a_kind_of_drafter(kind: str, tmp_path: Path, sized: Sized, tell: Tell) -> None:
    """Of random weights."""
    plain = assembled(save_two_layers(tmp_path / "model"))
    weights = save_drafter(tmp_path / "drafter", plain, kind=kind, **trained_kind(kind).shape)
    assembly = assemble(plain.config.model_copy(update={"drafter": kind, "drafter_path": weights}))
    num_tokens = int(KIND_SHARE * sized(MANY_TOKENS))
    assert_lossless(assembly, varied_prompts(), num_tokens, 200, tell=tell)


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path, sized: Sized, tell: Tell) -> None:
    assembly = assemble(ServiceConfig(device="cpu", state_dir=tmp_path))
    assert_lossless(assembly, read_prompt_set(BUILT_IN, assembly.tokenizer).prompts, sized(EMBEDDED_TOKENS), tell=tell)


# All that a step computes, captured by what cannot run Python again, gives the text of plain decoding.


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
        patch.setattr(AskGate, "ask", always_ask)
        yield assemble(config, graphs=True)


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


def test_captured_steps_verify_what_was_written(plain: Assembly, captured: Assembly) -> None:
    """Some texts are known to the end, some in part, some not."""
    asked = [request(str(n), prompt, sampled(n, 24)) for n, prompt in enumerate(random_prompts(3, 20))]
    expected = generate(plain.engine(plain.drafter("none"), FixedBudget(0)), *asked)
    again = [replace(one, replayed=(expected[str(n), 0].tokens[: 12 * n],)) for n, one in enumerate(asked)]
    found = generate(captured.engine(policy=FixedBudget(20)), *again)
    assert _tokens(found) == _tokens(expected)
    assert [found[str(n), 0].accepted >= least for n, least in enumerate((0, 10, 21))] == [True] * 3


def _tokens(generated: dict[tuple[str, int], Generated]) -> dict[tuple[str, int], list[int]]:
    return {key: one.tokens for key, one in generated.items()}
