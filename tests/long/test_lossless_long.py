"""A million tokens on tiny models of every family, and the embedded model as it is served."""

from pathlib import Path

import pytest

from service.assembly import assemble
from service.bench.lossless import built_in_prompts, check
from service.config import ServiceConfig
from tests.e2e.test_lossless import assert_lossless
from tests.service.bench.parts import assembled, save_two_layers, varied_prompts
from tests.tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.slow

LLAMA_TOKENS = 400_000
TOKENS_PER_FAMILY = (1_000_000 - LLAMA_TOKENS) // (len(FAMILIES) - 1)
EMBEDDED_TOKENS = 20_000


def test_llama(tmp_path: Path) -> None:
    assembly = assembled(save_two_layers(tmp_path))
    assert_lossless(check(assembly, varied_prompts(), num_tokens=LLAMA_TOKENS, seed=100), LLAMA_TOKENS)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_another_family(family: str, tmp_path: Path) -> None:
    assembly = assembled(tiny_model(family, tmp_path))
    result = check(assembly, varied_prompts(), num_tokens=TOKENS_PER_FAMILY, seed=100)
    assert_lossless(result, TOKENS_PER_FAMILY)


def test_the_embedded_model(tmp_path: Path) -> None:
    assembly = assemble(ServiceConfig(device="cpu", state_dir=tmp_path))
    assert assembly.numerics == "exact"
    result = check(assembly, built_in_prompts(assembly.tokenizer), num_tokens=EMBEDDED_TOKENS)
    assert_lossless(result, EMBEDDED_TOKENS)
