"""Clients that applications use, each in an environment of its own, for their requirements clash, against a running
server."""

import json
import shutil
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from service.engine.weights import EMBEDDED_NAME, gguf_file
from tests.environments import node_environment, python_environment, run
from tests.processes import Process, serving_tiny
from tests.tiny_models import stock, tiny_model

HERE = Path(__file__).parent
pytestmark = pytest.mark.slow("each client is installed first", covers="service/api tests/e2e/clients")

# The first two are large to install, and an agent of the third asks a random model until it answers.
SLOW = [pytest.param(client, marks=pytest.mark.slow) for client in ("langchain", "litellm", "pydantic_ai")]


@pytest.mark.parametrize("client", ["openai", "instructor", *SLOW])
def test_python_clients(client: str, tiny_server: Process) -> None:
    folder = python_environment(HERE / f"{client}.txt")
    spoken = run(["bin/python", str(HERE / f"check_{client}.py"), f"{tiny_server.url}/v1"], folder)
    assert spoken.count("ok ") >= 3


def test_the_ai_sdk_of_npm(tiny_server: Process) -> None:
    folder = node_environment(HERE / "package.json")
    shutil.copy(HERE / "check_ai_sdk.mjs", folder)  # modules are looked for beside a script
    spoken = run(["node", "check_ai_sdk.mjs", f"{tiny_server.url}/v1"], folder)
    assert spoken.count("ok ") == 6


QUESTIONS = (
    ("Which of these do plants need to make food?", ("light", "salt", "sand", "iron bars"), 0),
    ("What do bees make?", ("honey", "milk", "bread", "wool"), 0),
    ("Which planet is closest to the sun?", ("Mars", "Mercury", "Saturn", "Neptune"), 1),
    ("Water freezes at", ("100 degrees Celsius", "50 degrees Celsius", "0 degrees Celsius", "200 degrees Celsius"), 2),
    ("Which animal can fly?", ("a horse", "a bat", "a fish", "a snake"), 1),
    ("Which is a source of light?", ("a stone", "the moon's soil", "the sun", "a mirror in the dark"), 2),
    ("The heart pumps", ("air", "blood", "bone", "light"), 1),
    ("Which is a liquid at room temperature?", ("iron", "wood", "water", "glass"), 2),
    ("Ice is", ("solid water", "burnt wood", "a metal", "a gas"), 0),
    ("A magnet attracts", ("paper", "iron", "plastic", "wood"), 1),
    ("Which sense uses the ears?", ("sight", "hearing", "taste", "touch"), 1),
    ("Fish breathe with", ("lungs", "gills", "skin of their tails", "ears"), 1),
    ("What pulls things to the ground?", ("gravity", "sound", "colour", "heat"), 0),
    ("The largest ocean is the", ("Pacific", "Arctic", "Indian", "Black Sea"), 0),
    ("Which season follows winter?", ("autumn", "spring", "summer", "winter"), 1),
    ("A thermometer measures", ("weight", "temperature", "length", "time"), 1),
    ("Which of these is a mammal?", ("an eagle", "a whale", "a frog", "a bee"), 1),
    ("Plants take in water by their", ("flowers", "roots", "seeds", "thorns"), 1),
    ("A year has", ("12 months", "20 months", "5 months", "100 months"), 0),
    ("Wind is moving", ("water", "air", "sand", "light"), 1),
)


def asked_by_the_harness(model: Path, load_dtype: str, folder: Path) -> list[list[float]]:
    """Scores of each question's choices."""
    questions = folder / "questions.jsonl"
    lines = [{"question": asked, "choices": choices, "gold": gold} for asked, choices, gold in QUESTIONS]
    questions.write_text("\n".join(map(json.dumps, lines)))
    settings = {"model": str(model), "served_model_name": "own", "load_dtype": load_dtype, "max_model_len": 256}
    running = serving_tiny(folder, kv_cache="200MiB", **settings)
    environment, check = python_environment(HERE / "lm_eval.txt"), str(HERE / "check_lm_eval.py")
    try:
        spoken = run(["bin/python", check, f"{running.url}/v1", "own", str(model), str(questions)], environment)
    finally:
        running.end()
    found = [json.loads(line) for line in spoken.splitlines() if line.startswith("{")]
    return [one["scores"] for one in sorted(found, key=itemgetter("doc"))]


def scored_by_transformers(model: Path, dtype: torch.dtype) -> Iterator[list[tuple[float, int]]]:
    """The same, each with the number of its tokens."""
    tokenizer, plain = AutoTokenizer.from_pretrained(model), stock(model, dtype)
    for asked, choices, _ in QUESTIONS:
        context = f"Question: {asked}\nAnswer:"
        begin, scores = len(tokenizer.encode(context)), []
        for choice in choices:
            ids = tokenizer.encode(f"{context} {choice}")
            with torch.no_grad():
                logprobs = plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            reported = [float(logprobs[place - 1, ids[place]]) for place in range(begin, len(ids))]
            scores.append((sum(reported), len(reported)))
        yield scores


@pytest.mark.slow  # to install
def test_lm_evaluation_harness_gets_the_scores_of_transformers(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    found = asked_by_the_harness(model, "float32", tmp_path)
    for scores, expected in zip(found, scored_by_transformers(model, torch.float32), strict=True):
        for score, (sum_, count) in zip(scores, expected, strict=True):
            assert score == pytest.approx(sum_, abs=1e-3 * count)


@pytest.mark.slow
def test_lm_evaluation_harness_gets_the_choices_of_transformers_in_bf16(
    tmp_path: Path, tell: Callable[..., None]
) -> None:
    """Of the embedded model: both round, each in its own way."""
    file, model = gguf_file(EMBEDDED_NAME), tmp_path / "model"
    assert file is not None
    named = {"gguf_file": file.name}
    AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **named).save_pretrained(model)
    AutoTokenizer.from_pretrained(file.parent, **named).save_pretrained(model)
    found = asked_by_the_harness(model, "bfloat16", tmp_path)
    expected = [[score for score, _ in scores] for scores in scored_by_transformers(model, torch.bfloat16)]
    same = sum(scores.index(max(scores)) == by.index(max(by)) for scores, by in zip(found, expected, strict=True))
    tell(questions=len(found), same_choices=same)
    assert same >= len(QUESTIONS) - 1
