"""Number one of all tests: every way of decoding gives the text of plain decoding, token by token.

Sixty thousand tokens on tiny models in fp32, most of them on the fastest one. The slow tests: a million by every family
and kind of drafter, and the embedded model as it is served.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from drafters.trained_kinds import TRAINED_KINDS
from service.assembly import Assembly, assemble
from service.bench.lossless import built_in_prompts, check
from service.config import ServiceConfig
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, varied_prompts
from tests.tiny_models import FAMILIES, tiny_model

OTHERS = [family for family in FAMILIES if family != "llama"]
FEW_CASES = 10  # of which all may have had room
MANY_TOKENS = 1_000_000
KINDS = (*TRAINED_KINDS, "early_exit(1)")
FAMILY_SHARE, KIND_SHARE = 0.8 / len(FAMILIES), 0.2 / len(KINDS)
EMBEDDED_TOKENS = 100_000
Tell = Callable[..., None]
Sized = Callable[[int], int]


def assert_lossless(
    assembly: Assembly, prompts: list[list[int]], num_tokens: int, seed: int = 0, *, tell: Tell = lambda **_: None
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
    num_tokens = 2_000 if family in OTHERS else 60_000 - 2_000 * len(OTHERS)
    assert_lossless(assembled(target_of(family, tmp_path)), varied_prompts(), num_tokens, FAMILIES.index(family))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_tokens_of_a_family(family: str, tmp_path: Path, sized: Sized, tell: Tell) -> None:
    num_tokens = int(FAMILY_SHARE * sized(MANY_TOKENS))
    assert_lossless(assembled(target_of(family, tmp_path)), varied_prompts(), num_tokens, 100, tell=tell)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens_by_a_kind_of_drafter(kind: str, tmp_path: Path, sized: Sized, tell: Tell) -> None:
    """Of random weights."""
    plain = assembled(save_two_layers(tmp_path / "model"))
    changes: dict[str, object] = {"drafter": kind}
    if kind in TRAINED_KINDS:
        changes["drafter_path"] = save_drafter(tmp_path / "drafter", plain, kind=kind, **TRAINED_KINDS[kind].shape)
    assembly = assemble(plain.config.model_copy(update=changes))
    num_tokens = int(KIND_SHARE * sized(MANY_TOKENS))
    assert_lossless(assembly, varied_prompts(), num_tokens, 200, tell=tell)


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path, sized: Sized, tell: Tell) -> None:
    assembly = assemble(ServiceConfig(device="cpu", state_dir=tmp_path))
    assert_lossless(assembly, built_in_prompts(assembly.tokenizer), sized(EMBEDDED_TOKENS), tell=tell)
