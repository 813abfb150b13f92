"""Peers do the same work as ours, or say what keeps them from it."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from benchmarks.peers import LlamaCppPeer, TransformersPeer
from service.assembly import Assembly, assemble
from service.bench.driver import generate
from service.bench.experiment import plain_engine
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest, SamplingParams
from service.errors import StartupError
from tests.service.bench.parts import settings_for, varied_prompts


@pytest.mark.parametrize("count", [1, 3])
def test_the_peer_writes_the_same_greedy_text(assembly: Assembly, count: int) -> None:
    requests = [
        GenerationRequest(
            request_id=str(index), prompt=prompt, sampling=SamplingParams(seed=0, max_tokens=20, temperature=0)
        )
        for index, prompt in enumerate(varied_prompts()[:count])
    ]
    ours, peer = generate(plain_engine(assembly), requests).answers, TransformersPeer(assembly)(requests).answers
    assert [answer.token_ids for answer in peer] == [answer.token_ids for answer in ours]


@pytest.fixture
def _llama_cpp_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has the package, or seems to: what is refused here is refused before it is imported."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())


def test_llama_cpp_is_refused_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="pip install llama-cpp-python"):
        LlamaCppPeer.refuse(ServiceConfig(device="cpu"), concurrency=1)


@pytest.mark.usefixtures("_llama_cpp_is_found")
def test_llama_cpp_is_refused_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "some.gguf"
    file.touch()
    served = ServiceConfig(model=str(file), device="cpu")
    LlamaCppPeer.refuse(served, concurrency=1)
    with pytest.raises(StartupError, match="--concurrency 1"):
        LlamaCppPeer.refuse(served, concurrency=2)
    with pytest.raises(StartupError, match=r"--model FILE\.gguf"):
        LlamaCppPeer.refuse(settings_for(tmp_path), concurrency=1)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(StartupError, match="--device cpu"):
        LlamaCppPeer.refuse(served.model_copy(update={"device": "auto"}), concurrency=1)


def test_speed_shows_the_peer(
    run: Callable[..., tuple[int, str]],
    prompt_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    assembly: Assembly,
    quiet: None,
) -> None:
    monkeypatch.setattr("service.bench.experiment.assemble", lambda config: assembly)
    out = tmp_path / "out.json"
    code, output = run(
        *("speed", "--prompts", prompt_file, "--prompts", prompt_file, "--max-tokens", 4),
        *("--peer", "transformers", "--temperature", 1, "--concurrency", 2, "--out", out),
    )
    assert code == 0, output
    assert "plain / transformers" in output
    report = json.loads(out.read_text())
    assert [set(row["tokens_per_second"]) for row in report["rows"]] == [{"plain", "speculative", "transformers"}] * 2
    means = {ours: pytest.approx(mean(report, ours)) for ours in ("plain", "speculative")}
    assert report["summary"]["over_transformers"] == means


def mean(report: dict[str, Any], ours: str) -> float:
    """How many times as fast as the peer, over the sets."""
    return geometric_mean(
        row[f"{ours}_tokens_per_second"] / row["tokens_per_second"]["transformers"] for row in report["rows"]
    )


@pytest.mark.slow
def test_llama_cpp_answers_from_an_empty_cache_with_every_token(tmp_path: Path) -> None:
    """The first tokens are ours: later ones may not be, because it rounds activations to 8 bits."""
    pytest.importorskip("llama_cpp", reason="the optional package llama-cpp-python is not installed")
    changes = {"device": "cpu", "state_dir": tmp_path, "threads": 1, "budget_policy": "fixed"}
    assembly = assemble(ServiceConfig().model_copy(update=changes))
    peer = LlamaCppPeer(assembly)
    assert "llama_cpp_system_info" in peer.conditions

    def answer(temperature: float) -> tuple[int, ...]:
        prompt = assembly.tokenizer.encode("The capital of France is")
        sampling = SamplingParams(seed=1, max_tokens=24, temperature=temperature, ignore_eos=True)
        request = GenerationRequest(request_id="a", prompt=prompt, sampling=sampling)
        found, ours = (run([request]).answers[0].token_ids for run in (peer, partial(generate, plain_engine(assembly))))
        if not temperature:
            assert found[:2] == ours[:2]
        return found

    greedy, sampled = answer(0.0), answer(1.0)
    assert len(greedy) == len(sampled) == 24
    assert answer(0.0) == greedy != sampled
    assert answer(1.0) == sampled
