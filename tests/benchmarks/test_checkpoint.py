"""Checkpoints that measure costs: widened models compute what the narrow ones do and are served with a drafter that
fits; random ones have the published shapes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.checkpoint import DRAFTER, SHAPES, dummy_config, dummy_tokenizer, widened, write_dummy
from service.assembly import Assembly, assemble
from service.bench.driver import Run, generate
from service.bench.experiment import Measure, mismatches, plain_engine, requests_from, tau
from service.config import ServiceConfig
from service.engine.weights import refuse_unsupported
from service.errors import StartupError
from tests.service.bench.parts import assembled, save_drafter, save_two_layers, settings_for, varied_prompts
from tests.tiny_models import loaded_tiny

PROMPTS = varied_prompts()[:3]
Command = Callable[..., tuple[int, str]]


def logits(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found: torch.Tensor = model(tokens).logits
    return found


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_copy_computes_what_the_one_did(family: str) -> None:
    model = loaded_tiny(family).model
    wide = widened(model, 4)
    tokens = torch.arange(40)[None] % model.config.vocab_size
    expected = logits(model, tokens)
    torch.testing.assert_close(logits(wide, tokens), expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)
    assert sum(p.numel() for p in wide.parameters()) > 4 * sum(p.numel() for p in model.parameters())


def test_what_cannot_be_widened_is_refused() -> None:
    with pytest.raises(StartupError, match=r"gemma.*llama, mistral, qwen2, qwen3"):
        widened(loaded_tiny("gemma3").model, 2)
    with pytest.raises(StartupError, match="power of two"):
        widened(loaded_tiny("llama").model, 3)


def runs_of(assembly: Assembly) -> list[Run]:
    """Plain and drafted answers, greedy and sampled."""
    runs = []
    for temperature in (0.0, 1.0):
        requests = requests_from(PROMPTS, 0, Measure(temperature, 32, len(PROMPTS), seed=1))
        runs += [generate(engine, requests) for engine in (plain_engine(assembly), assembly.engine())]
        assert mismatches(runs[-2:-1], runs[-1:]) == 0
    return runs


def test_a_widened_checkpoint_is_served_like_any_other(run: Command, tmp_path: Path) -> None:
    """Its weights are those of the model widened in memory, its texts and its drafts those of the narrow one."""
    folder, out = save_two_layers(tmp_path / "model"), tmp_path / "wide"
    drafter = save_drafter(tmp_path / "drafter", assembled(folder))
    words = ("--model", folder, "--drafter-path", drafter, "--state-dir", tmp_path, "--copies", 2, "--out", out)
    assert run("checkpoint", "widened", *words)[0] == 0
    narrow = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    expected, found = widened(narrow, 2).state_dict(), AutoModelForCausalLM.from_pretrained(out).state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    drafting = {"drafter": "specblock", "budget_policy": "fixed", "max_budget": 8}
    both = [
        runs_of(assemble(settings_for(model).model_copy(update={**drafting, "drafter_path": weights})))
        for model, weights in ((folder, drafter), (out, out / DRAFTER))
    ]
    assert mismatches(*both) == 0
    assert tau(both[1]) == pytest.approx(tau(both[0]), rel=0.02)
    assert tau(both[1]) > 1


@pytest.mark.parametrize(
    ("model", "command"), [("widen(smollm2-135m, 2)", "checkpoint widened"), ("dummy(tiny)", "checkpoint dummy")]
)
def test_former_names_of_models_name_the_command(model: str, command: str) -> None:
    with pytest.raises(ValidationError, match=f"python -m benchmarks {command}"):
        ServiceConfig(model=model)


@pytest.mark.parametrize(("name", "parameters"), [("llama-3.1-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360)])
def test_shapes_have_the_published_number_of_weights(name: str, parameters: int) -> None:
    config = dummy_config(name)
    refuse_unsupported(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(value.numel() for value in model.parameters()) == parameters
    with pytest.raises(StartupError, match=r"llama-3\.1-8b, qwen3-8b, tiny"):
        dummy_config("smollm2-135m")


def test_a_random_checkpoint_is_the_same_each_time_and_is_served_with_its_drafter(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    folder, again = (write_dummy("tiny", tmp_path / name) for name in ("first", "second"))
    assert torch.equal(torch.rand(3), expected), "other randomness is left alone"
    for file in ("model.safetensors", f"{DRAFTER}/model.safetensors"):
        assert (folder / file).read_bytes() == (again / file).read_bytes()
    drafting = {"drafter_path": folder / DRAFTER, "budget_policy": "fixed", "max_budget": 8}
    assembly = assemble(settings_for(folder).model_copy(update=drafting))
    assert assembly.drafter_name == "memory+specblock"
    assert assembly.loaded.eos_token_ids == {SHAPES["tiny"]["vocab_size"] - 1}
    assert len(runs_of(assembly)) == 4


def test_the_tokenizer_reads_and_writes_every_id() -> None:
    tokenizer = dummy_tokenizer(320)
    assert len(tokenizer) == 320
    assert tokenizer.decode(tokenizer("so it is").input_ids) == "so it is"
    assert all(tokenizer.decode([number]) for number in range(319))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "so"}], tokenize=False) == "so\n"


@pytest.mark.slow
def test_the_embedded_model_accepts_as_much_when_widened(run: Command, tmp_path: Path) -> None:
    wide = tmp_path / "wide"
    assert run("checkpoint", "widened", "--state-dir", tmp_path, "--out", wide)[0] == 0
    changes: tuple[dict[str, object], ...] = ({}, {"model": str(wide), "drafter_path": wide / DRAFTER})
    both = [
        runs_of(
            assemble(
                ServiceConfig.model_validate(
                    {"budget_policy": "fixed", "max_budget": 8, "load_dtype": "bfloat16", "state_dir": tmp_path, **one}
                )
            )
        )
        for one in changes
    ]
    assert tau(both[1]) == pytest.approx(tau(both[0]), rel=0.05)
