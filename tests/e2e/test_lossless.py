"""Number one of all tests: every way of decoding gives the text of plain decoding, token by token.

A hundred thousand tokens on tiny models in fp32, most of them on the fastest one.
"""

from pathlib import Path

import pytest

from service.bench.lossless import LosslessResult, check
from tests.service.bench.parts import assembled, save_two_layers, varied_prompts
from tests.tiny_models import FAMILIES, tiny_model

TOKENS_PER_FAMILY = 2_000
OTHER_FAMILIES = [family for family in FAMILIES if family != "llama"]
LLAMA_TOKENS = 100_000 - TOKENS_PER_FAMILY * len(OTHER_FAMILIES)


def assert_lossless(result: LosslessResult, num_tokens: int) -> None:
    print(f"{result.total.tokens_compared} tokens, {len(result.cases)} cases, {result.total.preemptions} preemptions")
    assert result.first is None
    assert result.total.mismatched_tokens == 0
    assert result.total.tokens_compared >= num_tokens
    assert result.total.preemptions > 0


def test_llama(tmp_path: Path) -> None:
    assembly = assembled(save_two_layers(tmp_path))
    assert assembly.numerics == "exact"
    assert_lossless(check(assembly, varied_prompts(), num_tokens=LLAMA_TOKENS), LLAMA_TOKENS)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_another_family(family: str, tmp_path: Path) -> None:
    assembly = assembled(tiny_model(family, tmp_path))
    assert assembly.numerics == "exact"
    result = check(assembly, varied_prompts(), num_tokens=TOKENS_PER_FAMILY, seed=FAMILIES.index(family))
    assert_lossless(result, TOKENS_PER_FAMILY)
