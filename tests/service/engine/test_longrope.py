"""longrope's factors are chosen once by the longest text, not by the texts that run together."""

from pathlib import Path

import pytest
import torch

from service.assembly import assemble, start_up_line
from service.engine.checks import longrope_factors
from tests.conformance.checkpoints import CHECKPOINTS, POSITIONS, made, save
from tests.conformance.judges import TEXTS, distance, loaded, our_scores, scores_of
from tests.conformance.measures import FLOOR
from tests.service.bench.parts import settings_for
from tests.tiny_models import stock

CHECKPOINT = next(one for one in CHECKPOINTS if one.kind == "longrope")
TRAINED = CHECKPOINT.config["original_max_position_embeddings"]
SHORT = [text[:TRAINED] for text in TEXTS[:2]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(made(CHECKPOINT), tmp_path_factory.mktemp("longrope"))


@pytest.mark.parametrize(
    ("longest", "factors"), [(TRAINED, "short"), (TRAINED + 1, "long"), (POSITIONS, "long"), (None, "long")]
)
def test_the_longest_text_chooses(longest: int | None, factors: str) -> None:
    assert longrope_factors(CHECKPOINT.described(), longest) == factors


def test_without_longrope_there_is_nothing_to_choose() -> None:
    assert longrope_factors(CHECKPOINT.described("longrope"), 512) is None


def test_short_texts_have_the_short_factors_if_no_text_is_longer(folder: Path) -> None:
    found = our_scores(loaded(folder, torch.float32, max_model_len=TRAINED), SHORT)
    assert distance(found, scores_of(stock(folder), SHORT)).mean <= FLOOR


def test_short_texts_have_the_long_factors_beside_long_ones(folder: Path) -> None:
    found = our_scores(loaded(folder, torch.float32), SHORT)
    assert distance(found, scores_of(stock(folder), TEXTS[:2])[:, :TRAINED]).mean <= FLOOR
    assert distance(found, scores_of(stock(folder), SHORT)).mean > 1e-3


@pytest.mark.parametrize(("longest", "factors"), [(TRAINED, "short"), (2 * TRAINED, "long")])
def test_the_start_says_the_choice(longest: int, factors: str, folder: Path) -> None:
    config = settings_for(folder).model_copy(update={"max_model_len": longest, "budget_policy": "fixed"})
    assert f"context {longest} ({factors} factors of longrope)" in start_up_line(assemble(config))
