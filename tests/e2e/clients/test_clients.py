"""Clients that applications use, each in an environment of its own, for their requirements clash, against a running
server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from tests.environments import node_environment, python_environment, run
from tests.processes import Process, serving_tiny
from tests.tiny_models import stock, tiny_model

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    running = serving_tiny(tmp_path_factory.mktemp("clients"), kv_cache="200MiB")
    yield running
    running.end()


LARGE = [pytest.param(client, marks=pytest.mark.slow) for client in ("langchain", "litellm")]  # to install


@pytest.mark.parametrize("client", ["openai", "pydantic_ai", "instructor", *LARGE])
def test_python_clients(client: str, server: Process) -> None:
    folder = python_environment(HERE / f"{client}.txt")
    said = run(["bin/python", str(HERE / f"check_{client}.py"), f"{server.url}/v1"], folder)
    assert said.count("ok ") >= 3


def test_the_ai_sdk_of_npm(server: Process) -> None:
    folder = node_environment(HERE / "package.json")
    shutil.copy(HERE / "check_ai_sdk.mjs", folder)  # modules are looked for beside a script
    said = run(["node", "check_ai_sdk.mjs", f"{server.url}/v1"], folder)
    assert said.count("ok ") == 6


QUESTIONS = (
    ("What do bees make?", ("honey", "milk", "bread", "wool"), 0),
    ("Which planet is closest to the sun?", ("Mars", "Mercury", "Saturn", "Neptune"), 1),
    ("Ice is", ("solid water", "burnt wood", "a metal", "a gas"), 0),
    ("Fish breathe with", ("lungs", "gills", "skin", "ears"), 1),
    ("The heart pumps", ("air", "blood", "bone", "light"), 1),
)


@pytest.mark.slow  # to install
def test_lm_evaluation_harness_gets_the_scores_of_transformers(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path / "model")
    questions = tmp_path / "questions.jsonl"
    lines = [{"question": asked, "choices": choices, "gold": gold} for asked, choices, gold in QUESTIONS]
    questions.write_text("\n".join(map(json.dumps, lines)))
    running = serving_tiny(
        tmp_path, kv_cache="200MiB", model=str(model), served_model_name="own", load_dtype="float32", max_model_len=256
    )
    folder, check = python_environment(HERE / "lm_eval.txt"), str(HERE / "check_lm_eval.py")
    try:
        said = run(["bin/python", check, f"{running.url}/v1", "own", str(model), str(questions)], folder)
    finally:
        running.end()
    found = {
        one["doc"]: one["scores"] for one in map(json.loads, filter(lambda line: line[0] == "{", said.splitlines()))
    }
    tokenizer, plain = AutoTokenizer.from_pretrained(model), stock(model)
    for place, (asked, choices, _) in enumerate(QUESTIONS):
        context = tokenizer.encode(f"Question: {asked}\nAnswer:")
        for choice, score in zip(choices, found[place], strict=True):
            ids = tokenizer.encode(f"Question: {asked}\nAnswer: {choice}")
            with torch.no_grad():
                logprobs = plain(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            tokens = range(len(context), len(ids))
            expected = sum(float(logprobs[place - 1, ids[place]]) for place in tokens)
            assert score == pytest.approx(expected, abs=1e-3 * len(tokens))
