"""From settings to an engine that works, and the settings that stop the start."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kernels import ops
from kernels.cpu import library
from kernels.cpu.library import threads_in_use, use_threads
from service.assembly import Assembly, assemble, start_up_line
from service.config import ServiceConfig
from service.engine.budget import FixedBudget
from service.errors import StartupError
from tests.service.engine.harness import alone, generate, greedy, request
from tests.service.engine.test_drafting import Watcher, weights_in
from tests.tiny_models import tiny_model


def settings(folder: Path, **values: object) -> ServiceConfig:
    given = {"model": str(folder), "threads": 1, "load_dtype": "float32", "kv_cache": "1MiB", "max_model_len": 200}
    return ServiceConfig.model_validate({**given, "state_dir": folder / "state", "device": "cpu", **values})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    yield
    use_threads(1)


@pytest.fixture(scope="module")
def assembly(folder: Path) -> Assembly:
    return assemble(settings(folder))


def test_an_assembled_engine_writes_the_text_of_a_hand_made_one(assembly: Assembly) -> None:
    result = generate(assembly.engine(), request("a", [5, 6, 7], greedy(30)))["a", 0]
    assert result.tokens == alone(greedy(30), [5, 6, 7]).tokens
    assert result.text == assembly.tokenizer.decode(result.tokens, skip_special_tokens=True)


def test_the_limits_are_those_of_the_settings(folder: Path) -> None:
    values = {"max_sequences": 3, "prefill_chunk": 17, "max_budget": 5, "max_model_len": 99, "budget_policy": "fixed"}
    assembly = assemble(settings(folder, **values))
    limits = assembly.limits
    assert (limits.max_sequences, limits.prefill_chunk, limits.max_budget, limits.max_model_len) == (3, 17, 5, 99)
    assert assembly.costs is None
    assert threads_in_use() == 1


@pytest.mark.parametrize(("pace_seconds", "weight"), [(1e-9, 4.0), (1e9, 1.0)])
def test_the_latency_objective_reaches_the_budget(assembly: Assembly, pace_seconds: float, weight: float) -> None:
    """No answer keeps the first pace, and every one the second."""
    wish = {"stream_release": f"paced({pace_seconds:.9f})"}
    config = assembly.config.model_copy(update=wish)
    hurried = replace(assembly, limits=replace(assembly.limits, pace_seconds=config.pace_seconds))
    engine = hurried.engine(policy=Watcher())
    weights = weights_in(engine._draft_stage)
    assert alone(greedy(12), [5, 6, 7], engine).tokens == alone(greedy(12), [5, 6, 7]).tokens
    assert len(weights) > 2
    assert weights == [[weight]] * len(weights)


@pytest.mark.parametrize(("values", "name"), [({}, "memory"), ({"drafter": "none"}, "none")])
def test_the_drafter_follows_the_settings(values: dict[str, object], name: str, folder: Path) -> None:
    assembly = assemble(settings(folder, budget_policy="fixed", **values))
    assert assembly.drafter_name == assembly.drafter().name == name


def test_the_start_up_line_says_what_matters(assembly: Assembly, folder: Path) -> None:
    line = start_up_line(assembly)
    for part in (
        folder.name,
        "cpu",
        "float32",
        str(assembly.engine().slots.capacity),
        "context 200",
        "numerics: exact",
        "kernels: ",
        "drafter memory",
        "ends <|end|>",
    ):
        assert part in line
    assert "\n" not in line


def test_the_fingerprint_knows_weights_and_type_but_no_drafter(
    assembly: Assembly, folder: Path, tmp_path: Path
) -> None:
    fixed = {"budget_policy": "fixed"}
    same = assemble(settings(folder, drafter="none", max_budget=1, max_sequences=2, **fixed))
    other_weights = assemble(settings(tiny_model("llama", tmp_path, seed=1), **fixed))
    other_type = assemble(settings(folder, load_dtype="bfloat16", **fixed))
    assert same.fingerprint == assembly.fingerprint
    assert len({assembly.fingerprint, other_weights.fingerprint, other_type.fingerprint}) == 3
    assert assembly.fingerprint.startswith("fp_")


@pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
def test_the_fingerprint_names_the_build_only_where_bits_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    floats = assemble(settings(folder, budget_policy="fixed"))
    blocks = assemble(settings(folder, load_dtype="int8", budget_policy="fixed"))
    found = dict[str, tuple[str, str]]()
    for build in ("avx2", "avx512", "torch"):
        monkeypatch.setattr(ops, "kernel_set", lambda device, build=build: build)
        found[build] = floats.fingerprint, blocks.fingerprint
    assert len({of_floats for of_floats, _ in found.values()}) == 3
    assert found["avx2"][1] == found["avx512"][1] != found["torch"][1]


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"max_model_len": 1025}, "max_model_len"),
        ({"kv_cache": "0.1MiB"}, "kv_cache"),
        ({"device": "cuda:99"}, "set device to cpu"),
        ({"model": "./no-such-folder"}, "no such folder"),
    ],
)
def test_impossible_settings_stop_the_start(values: dict[str, object], remedy: str, folder: Path) -> None:
    with pytest.raises(StartupError, match=remedy):
        assemble(settings(folder, **values))


def test_the_context_defaults_to_what_the_model_was_made_for(folder: Path) -> None:
    config = settings(folder, max_model_len=None, kv_cache="10MiB", budget_policy="fixed")
    assert assemble(config).limits.max_model_len == 1024


@pytest.mark.slow
def test_the_embedded_model_starts_as_it_comes(tmp_path: Path) -> None:
    assembly = assemble(ServiceConfig(state_dir=tmp_path, kv_cache="400MiB"))
    assert assembly.numerics == "exact"
    hello = assembly.tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    plain = assembly.engine(assembly.drafter("none"), FixedBudget(0))
    asked = request("a", hello, greedy(12))
    assert generate(assembly.engine(), asked)["a", 0].text == generate(plain, asked)["a", 0].text
