"""Number one of all tests: every way of decoding gives the text of plain decoding, token by token.

Sixty thousand tokens on tiny models in fp32, most of them on the fastest one. The slow tests: a million, and the
embedded model as it is served.
"""

from pathlib import Path

import pytest

from service.assembly import Assembly, assemble
from service.bench.lossless import built_in_prompts, check
from service.config import ServiceConfig
from tests.service.bench.parts import assembled, save_two_layers, varied_prompts
from tests.tiny_models import FAMILIES, tiny_model

OTHERS = [family for family in FAMILIES if family != "llama"]
EMBEDDED_TOKENS = 20_000
FEW_CASES = 10  # of which all may have had room


def tokens_of(family: str, all_tokens: int, per_other: int) -> int:
    return per_other if family != "llama" else all_tokens - per_other * len(OTHERS)


def assert_lossless(assembly: Assembly, prompts: list[list[int]], num_tokens: int, seed: int = 0) -> None:
    assert assembly.numerics == "exact"
    result = check(assembly, prompts, num_tokens=num_tokens, seed=seed)
    print(f"{result.total.tokens_compared} tokens, {len(result.cases)} cases, {result.total.preemptions} preemptions")
    assert result.first is None
    assert result.total.mismatched_tokens == 0
    assert result.total.tokens_compared >= num_tokens
    assert result.total.preemptions > 0 or len(result.cases) < FEW_CASES


@pytest.mark.parametrize(
    ("family", "num_tokens", "seed"),
    [
        *((family, tokens_of(family, 60_000, 2_000), FAMILIES.index(family)) for family in FAMILIES),
        *(
            pytest.param(family, tokens_of(family, 1_000_000, 600_000 // len(OTHERS)), 100, marks=pytest.mark.slow)
            for family in FAMILIES
        ),
    ],
)
def test_a_family(family: str, num_tokens: int, seed: int, tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path) if family == "llama" else tiny_model(family, tmp_path)
    assert_lossless(assembled(folder), varied_prompts(), num_tokens, seed)


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path) -> None:
    assembly = assemble(ServiceConfig(device="cpu", state_dir=tmp_path))
    assert_lossless(assembly, built_in_prompts(assembly.tokenizer), EMBEDDED_TOKENS)
