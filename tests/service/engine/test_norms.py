"""Norms in their short form: the same bits, and only where they are the same."""

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from service.engine.norms import ShortRMSNorm, shorten_norms


class ScaledTwice(nn.Module):
    """Looks like the norm that is replaced and computes another."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.rms_norm(x, (16,), self.weight, self.variance_epsilon)


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Qwen3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_short_form_gives_equal_bits(kind: type[nn.Module], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    norm = kind(64, 1e-5).to(dtype)
    norm.get_parameter("weight").copy_(torch.rand(64, generator=generator) * 2)
    model = nn.Sequential(norm)
    assert shorten_norms(model) == 1
    assert isinstance(model[0], ShortRMSNorm)
    for rows in (1, 2, 7, 33, 128):
        x = (torch.randn(1, rows, 64, generator=generator) * 20).to(dtype)
        assert torch.equal(model(x), norm(x))


@pytest.mark.parametrize("norm", [ScaledTwice(), GemmaRMSNorm(16), nn.LayerNorm(16), nn.Linear(16, 16)])
def test_whatever_computes_something_else_stays(norm: nn.Module) -> None:
    model = nn.Sequential(norm)
    assert shorten_norms(model) == 0
    assert model[0] is norm


def test_weights_keep_their_names() -> None:
    model = nn.Sequential(LlamaRMSNorm(16))
    names = list(model.state_dict())
    shorten_norms(model)
    assert list(model.state_dict()) == names
