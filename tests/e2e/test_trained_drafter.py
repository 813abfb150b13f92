"""A trained drafter from a folder, alone and joined with the memory: found by its path, refused for another target, and
never a token different from plain decoding."""

from pathlib import Path

import pytest

from kernels.families import OF_DRAFTERS
from service.assembly import Assembly, assemble
from service.bench.driver import generate
from service.bench.lossless import TRAINED_WAYS, check, ordered_cases
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import StartupError
from tests.service.bench.parts import save_drafter, save_two_layers, settings_for, varied_prompts
from tests.tiny_models import tiny_model

TOKENS = 2_000


def assembled_with(folder: Path, drafter: Path, name: str = "auto", **changes: object) -> Assembly:
    settings = settings_for(folder).model_copy(update={"drafter_path": drafter, "drafter": name, **changes})
    return assemble(settings)


@pytest.mark.parametrize("entries", ["first", "all"])
def test_text_is_that_of_plain_decoding(tmp_path: Path, entries: str) -> None:
    folder = save_two_layers(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter", assemble(settings_for(folder)), prefix_entries=entries)
    assembly = assembled_with(folder, drafter)
    assert assembly.drafter_name == "memory+specblock"
    cases = [case for case in ordered_cases(0, TRAINED_WAYS) if case.way in TRAINED_WAYS]
    result = check(assembly, varied_prompts(), num_tokens=TOKENS, cases=cases)
    assert result.total.mismatched_tokens == 0
    assert result.total.tokens_compared >= TOKENS
    assert result.total.accepted_tokens > 0


IN_MINUTES = ("llama", "olmo2", "gemma3")  # norms before, norms behind, windows
REST = pytest.mark.slow("these differ from others by little", covers="drafters/network kernels/families.py")


@pytest.mark.parametrize(
    "family", [*IN_MINUTES, *(pytest.param(one, marks=REST) for one in OF_DRAFTERS if one not in IN_MINUTES)]
)
def test_other_families(tmp_path: Path, family: str) -> None:
    folder = tiny_model(family, tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter", assemble(settings_for(folder)))
    assembly = assembled_with(folder, drafter, "specblock")
    cases = [case for case in ordered_cases(1, TRAINED_WAYS) if case.way.drafter == "specblock"]
    result = check(assembly, varied_prompts(), num_tokens=1_000, cases=cases)
    assert result.total.mismatched_tokens == 0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a target and of a drafter for it."""
    root = tmp_path_factory.mktemp("shared")
    folder = save_two_layers(root / "model")
    return folder, save_drafter(root / "drafter", assemble(settings_for(folder)))


@pytest.mark.parametrize("blocks", [1, 4])
def test_every_number_of_blocks_drafts(shared: tuple[Path, Path], blocks: int) -> None:
    folder, drafter = shared
    assembly = assembled_with(folder, drafter, "specblock", draft_blocks=blocks, budget_policy="fixed")
    prompts = varied_prompts()[:3]

    def answers(name: str, temperature: float) -> list[tuple[int, ...]]:
        params = SamplingParams(seed=5, max_tokens=12, temperature=temperature, ignore_eos=True)
        requests = [GenerationRequest(request_id=str(i), prompt=p, sampling=params) for i, p in enumerate(prompts)]
        run = generate(assembly.engine(drafter=assembly.drafter(name)), requests)
        return [answer.token_ids for answer in run.answers]

    for temperature in (0.0, 0.9):
        assert answers("specblock", temperature) == answers("none", temperature)


def test_a_drafter_of_another_target_is_refused(shared: tuple[Path, Path], tmp_path: Path) -> None:
    _, drafter = shared
    other = save_two_layers(tmp_path / "other", hidden_size=48)
    with pytest.raises(StartupError, match=r"trained for target .* train a drafter for it"):
        assembled_with(other, drafter)


def test_a_trained_drafter_needs_weights(shared: tuple[Path, Path]) -> None:
    settings = settings_for(shared[0]).model_copy(update={"drafter": "specblock"})
    with pytest.raises(StartupError, match="set drafter_path"):
        assemble(settings)
