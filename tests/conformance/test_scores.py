"""What is in the file is what runs: scores of every family are as near to the judge's as another engine's are."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from service.engine.checks import VERIFIED
from tests.conformance.checkpoints import CHECKPOINTS, POSITIONS, Checkpoint, made
from tests.conformance.judges import TEXTS, LlamaCpp, scores_of
from tests.conformance.measures import FORMS, KINDS, Form, kinds_of, of_file, of_folder, small

COVERS = "service/engine kernels tests/conformance"
MEASURED = pytest.mark.slow("two seconds a family; tests/e2e compares the texts of each", covers=COVERS)
JUDGED = pytest.mark.slow("llama.cpp is installed first", covers=COVERS)
PEAKED, SPREAD = 0.25, 2.0
FILES = [
    pytest.param(one, kind, id=f"{one}-{name}")
    for one in CHECKPOINTS
    if one.gguf
    for name, kind in kinds_of(one).items()
]


def test_the_table_has_every_family_that_is_served() -> None:
    assert {one.model_type for one in CHECKPOINTS} == VERIFIED


@MEASURED
@pytest.mark.parametrize("checkpoint", small(), ids=str)
def test_a_folder(checkpoint: Checkpoint, tmp_path: Path) -> None:
    of_folder(checkpoint, FORMS["bfloat16 in parts"], tmp_path, options=False).assert_conforms()


@JUDGED
@pytest.mark.parametrize("checkpoint", [one for one in small() if one.gguf], ids=str)
def test_a_gguf_file(checkpoint: Checkpoint, tmp_path: Path, llama_cpp: LlamaCpp) -> None:
    of_file(checkpoint, KINDS["Q8_0"], tmp_path, llama_cpp).assert_conforms()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
def test_every_folder(checkpoint: Checkpoint, form: Form, tmp_path: Path) -> None:
    of_folder(checkpoint, form, tmp_path).assert_conforms()


@pytest.mark.slow
@pytest.mark.parametrize(("checkpoint", "kind"), FILES)
def test_every_gguf_file(checkpoint: Checkpoint, kind: Kind, tmp_path: Path, llama_cpp: LlamaCpp) -> None:
    of_file(checkpoint, kind, tmp_path, llama_cpp).assert_conforms()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", CHECKPOINTS, ids=str)
@torch.inference_mode()
def test_checkpoints_are_loud(checkpoint: Checkpoint) -> None:
    """Attention is peaked, and logits are spread."""
    model = made(checkpoint)
    seen = model(torch.tensor(TEXTS[:1]), output_attentions=True).attentions
    largest = torch.stack([weights[0].amax(-1)[:, POSITIONS // 2 :].mean() for weights in seen])
    assert float(largest.mean()) >= PEAKED
    assert float(scores_of(model).std()) >= SPREAD
