"""Language models as drafters, from settings on: checked, exact by every way of decoding, and served over HTTP."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from service.assembly import Assembly, assemble
from service.bench.lossless import Way, check, ways_of
from service.errors import StartupError
from tests.processes import begin
from tests.service.bench.parts import save_two_layers, settings_for, varied_prompts
from tests.tiny_models import tiny_model, tiny_tokenizer

TOKENS = 1_500
QUESTION = {
    "model": "smollm2-135m",
    "messages": [{"role": "user", "content": "Name three rivers and what they are known for."}],
    "max_tokens": 48,
    "ignore_eos": True,
    "return_token_ids": True,
    "seed": 5,
}


def assembled_with(
    folder: Path, drafter: str, draft: Path | None = None, *, graphs: bool | None = None, **changes: object
) -> Assembly:
    settings = {"drafter": drafter, "drafter_path": draft, **changes}
    return assemble(settings_for(folder).model_copy(update=settings), graphs=graphs)


@pytest.mark.parametrize(("drafter", "graphs"), [("draft_model", None), ("memory+draft_model", True)])
def test_text_is_that_of_plain_decoding(tmp_path: Path, drafter: str, graphs: bool | None) -> None:
    """Also where everything around the model is captured, which itself is not."""
    folder, draft = save_two_layers(tmp_path / "model"), tiny_model("qwen3", tmp_path / "draft", seed=3)
    model = draft if "draft_model" in drafter else None
    assembly = assembled_with(folder, drafter, model, graphs=graphs, max_sequences=4)
    assert (assembly.target.capture is not None) is (graphs is True)
    assert assembly.drafter_name == assembly.drafter().name == drafter
    assert ways_of(assembly) == (Way(drafter, None), Way(drafter, 16), Way(drafter, 48))
    result = check(assembly, varied_prompts(), num_tokens=TOKENS)
    assert result.total.mismatched_tokens == 0
    assert result.total.tokens_compared >= TOKENS
    assert result.total.accepted_tokens > 0
    assert result.total.preemptions > 0


def test_keys_and_values_of_a_draft_model_come_out_of_what_is_set_for_them(tmp_path: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    alone = assembled_with(folder, "memory", budget_policy="fixed")
    together = assembled_with(folder, "draft_model", folder, budget_policy="fixed")  # twice as much in each slot
    assert together.target.pool.num_slots == alone.target.pool.num_slots // 2


def test_a_draft_model_has_to_be_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="set drafter_path to a folder"):
        assembled_with(save_two_layers(tmp_path), "draft_model")


def test_a_draft_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"nowhere.gguf.*no such file"):
        assembled_with(save_two_layers(tmp_path), "draft_model", tmp_path / "nowhere.gguf")


def test_a_draft_model_for_shorter_texts_is_refused(tmp_path: Path) -> None:
    target, draft = tiny_model("llama", tmp_path / "model"), save_two_layers(tmp_path / "draft")
    with pytest.raises(StartupError, match="supports 512 tokens: set max_model_len to at most that"):
        assembled_with(target, "draft_model", draft, max_model_len=None)


def test_an_unknown_drafter_stops_the_start_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(
        StartupError, match=r"unknown drafter 'eagle': choose one of memory.*draft_model.*change `drafter`"
    ):
        assembled_with(tmp_path, "eagle")


def changed(edit: Any) -> PreTrainedTokenizerFast:
    """The tiny tokenizer with something else in its file."""
    content = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    edit(content)
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), eos_token="<|end|>")


def _swap_tokens(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def _swap_merges(content: dict[str, Any]) -> None:
    merges = content["model"]["merges"]
    merges[2], merges[5] = merges[5], merges[2]


def _make_ordinary(content: dict[str, Any]) -> None:
    content["added_tokens"][0]["special"] = False


@pytest.mark.parametrize(
    ("edit", "difference"),
    [
        (_swap_tokens, r"token \d+ is 'a' for the target and 'b' for the draft model"),
        (_swap_merges, r"merge 2 is \['e', 'n'\] for the target and \['e', 'l'\] for the draft model"),
        (_make_ordinary, r"special token \d+ is '<\|extra_0\|>' for the target and none for the draft model"),
    ],
)
def test_a_draft_model_with_other_tokens_is_refused_with_what_differs(
    tmp_path: Path, edit: Any, difference: str
) -> None:
    folder, draft = save_two_layers(tmp_path / "model"), save_two_layers(tmp_path / "draft")
    changed(edit).save_pretrained(draft)
    with pytest.raises(StartupError, match=f"another tokenizer than the target: {difference}; set drafter_path"):
        assembled_with(folder, "draft_model", draft)


def answers_of(folder: Path, drafter: str) -> list[Any]:
    """Of the embedded model with this drafter, cold and warm."""
    settings: dict[str, object] = {"port": 0, "drafter": drafter, "max_model_len": 512, "threads": 1}
    settings |= {"budget_policy": "fixed", "max_budget": 16}
    settings |= {"drafter_path": "smollm2-135m"} if drafter == "draft_model" else {}
    config = folder / f"{drafter}.yaml"
    config.write_text(json.dumps(settings))
    server = begin(["serve"], config, folder / f"{drafter}.log")
    try:
        asked = [{**QUESTION, "temperature": temperature} for temperature in (0.0, 0.8)]
        return [server.ask("POST", "/v1/chat/completions", json=body).json() for body in asked]
    finally:
        server.end()


@pytest.mark.slow
def test_the_embedded_model_is_served(tmp_path: Path) -> None:
    """By a draft model that is the target itself."""
    answers = {name: answers_of(tmp_path, name) for name in ("none", "draft_model")}
    expected = [answer["choices"][0]["token_ids"] for answer in answers["none"]]
    assert [answer["choices"][0]["token_ids"] for answer in answers["draft_model"]] == expected
    records = [answer["metrics"]["speculative_decoding"] for answer in answers["draft_model"]]
    assert min(one["num_accepted_draft_tokens"] for one in records) > 30, "of 48, for the draft model knows all of them"
