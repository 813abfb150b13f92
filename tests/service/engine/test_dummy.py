"""Random weights in known shapes: shapes as published, the same weights each time, a tokenizer that knows every id."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from service.assembly import assemble, start_up_line
from service.config import ServiceConfig
from service.engine.dummy import SHAPES, dummy_config, dummy_tokenizer
from service.engine.weights import random_model, refuse_unsupported
from service.errors import StartupError
from tests.service.engine.harness import generate, greedy, request

CPU = torch.device("cpu")


@pytest.mark.parametrize(("name", "parameters"), [("llama-3.1-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360)])
def test_shapes_have_the_published_number_of_weights(name: str, parameters: int) -> None:
    config = dummy_config(name)
    refuse_unsupported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(value.numel() for value in model.parameters()) == parameters


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(StartupError, match=r"llama-3\.1-8b, qwen3-8b, tiny"):
        dummy_config("smollm2-135m")


def test_weights_are_the_same_each_time_and_leave_randomness_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, second = (random_model("tiny", dtype=torch.float32, device=CPU) for _ in range(2))
    assert torch.equal(torch.rand(3), expected)
    assert first.fingerprint == second.fingerprint
    assert first.eos_token_ids == {SHAPES["tiny"]["vocab_size"] - 1}


def test_the_tokenizer_reads_and_writes_every_id() -> None:
    tokenizer = dummy_tokenizer(320)
    assert len(tokenizer) == 320
    assert tokenizer.decode(tokenizer("so it is").input_ids) == "so it is"
    assert all(tokenizer.decode([number]) for number in range(319))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "so"}], tokenize=False) == "so\n"


def test_a_dummy_is_served_with_a_random_drafter(tmp_path: Path) -> None:
    settings = {"model": "dummy(tiny)", "load_dtype": "float32", "device": "cpu", "threads": 1}
    sizes = {"kv_cache": "20MiB", "max_model_len": 256, "max_sequences": 2, "budget_policy": "fixed", "max_budget": 8}
    config = ServiceConfig.model_validate({**settings, **sizes, "state_dir": tmp_path})
    assembly = assemble(config, graphs=True)
    assert assembly.drafter_name == "specblock"
    assert assembly.numerics == "exact"
    assert "steps captured" in start_up_line(assembly)
    asked = request("a", assembly.tokenizer.encode("so it is"), greedy(12))
    drafted = generate(assembly.engine(), asked)["a", 0]
    plain = generate(assembly.engine(assembly.drafter("none")), asked)["a", 0]
    assert drafted.end.speculation is not None
    assert sum(drafted.end.speculation.drafted_per_step) > 0
    assert drafted.tokens == plain.tokens
