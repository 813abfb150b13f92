"""The engine and its noise on a CUDA device; see docs/gpu.md for what has been confirmed."""

from pathlib import Path

import pytest
import torch

from kernels.gumbel import hash_bits
from service.assembly import assemble
from service.bench.lossless import check
from service.bench.lossless_report import built_in_prompts
from service.config import ServiceConfig
from tests.tiny_models import tiny_model

pytestmark = pytest.mark.gpu


def test_hash_bits_are_those_of_the_cpu() -> None:
    keys = torch.randint(-(2**31), 2**31 - 1, (7, 2), dtype=torch.int32)
    assert torch.equal(hash_bits(keys, 49_152), hash_bits(keys.cuda(), 49_152).cpu())


def test_every_way_of_decoding_gives_the_same_text(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path / "model")
    config = ServiceConfig(model=str(folder), device="cuda", load_dtype="float32", state_dir=tmp_path, kv_cache_gib=0.5)
    assembly = assemble(config)
    assert assembly.numerics == "exact"
    prompts = [prompt[:200] for prompt in built_in_prompts(assembly.tokenizer)]
    assert check(assembly, prompts, num_tokens=20_000, seed=0).holds
