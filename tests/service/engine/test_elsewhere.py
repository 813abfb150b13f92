"""Steps on a device that is only claimed: nothing is made in the wrong place, and the text is that of the CPU."""

from dataclasses import replace
from time import perf_counter

import pytest

from drafters import readback
from drafters.network.checkpoint import weights_of
from drafters.network.served import ServingNetwork
from drafters.registry import TrainedWeights
from kernels import ops
from kernels.graph_runner import rerun
from kernels.layers import Embedding
from service.drafter import make_drafter
from service.engine.budget import FixedBudget
from service.engine.captured import capture_forwards
from service.engine.engine import Engine
from service.engine.kv_pool import KVPool
from service.engine.measuring import Point, check, dummy_texts, run_point
from service.engine.target import Target
from service.engine.weights import LoadedModel
from tests.drafters.network.parts import target_config, tiny_drafter
from tests.service.engine.elsewhere import ELSEWHERE, Claimed, claims
from tests.service.engine.harness import (
    LIMITS,
    NUM_SLOTS,
    generate,
    greedy,
    request,
    sampled,
    tiny_engine,
    vocabulary_of,
    with_answers,
)
from tests.tiny_models import loaded_tiny, random_prompts


def engine_elsewhere(loaded: LoadedModel, drafter: str, nodes: int, *, captured: bool) -> Engine:
    """As `tiny_engine`, but everything except the weights is on the other device."""
    capture = rerun if captured else None
    pool = KVPool(loaded.kv_shape, NUM_SLOTS, ELSEWHERE)
    target = Target(loaded.model, pool, tap_layers=(0, 1, 2))
    target.device = ELSEWHERE
    limits = replace(LIMITS, max_sequences=2)
    if capture is not None:
        capture_forwards(target, capture, max_sequences=2, max_nodes=nodes, max_length=limits.max_model_len)
    weights = weights_elsewhere(loaded) if drafter == "specblock" else None
    drafts = make_drafter(drafter, target, limits, weights)
    target.capture = capture
    return Engine(target, limits, vocabulary_of(loaded), drafts, FixedBudget(nodes))


def weights_elsewhere(loaded: LoadedModel) -> TrainedWeights:
    model = tiny_drafter(trained_length=64)
    network = ServingNetwork(model.config, {name: value.to(ELSEWHERE) for name, value in weights_of(model).items()})
    return TrainedWeights(network, Embedding(loaded.parts.embedding), blocks=2, starts=2)


@pytest.fixture(name="loaded", autouse=True)
def _references_there(monkeypatch: pytest.MonkeyPatch) -> LoadedModel:
    """Weights are read and shapes are known before anything is elsewhere."""
    target_config("llama")
    monkeypatch.setattr(ops, "_table", lambda device_type: ops.REFERENCE)
    monkeypatch.setattr(readback, "clock_of", lambda device: perf_counter)
    return loaded_tiny("llama")


@pytest.mark.parametrize("captured", [False, True], ids=["as it is", "captured"])
@pytest.mark.parametrize(("drafter", "nodes"), [("none", 0), ("memory", 6), ("specblock", 6)])
def test_the_text_is_the_same(loaded: LoadedModel, drafter: str, nodes: int, captured: bool) -> None:
    prompts = list(random_prompts(3, 30))
    asked = with_answers([request("a", prompts[0], greedy(8)), request("b", prompts[1], sampled(5, 8))])
    expected = generate(tiny_engine(drafter="none", policy=FixedBudget(0)), *asked)
    with claims():
        engine = engine_elsewhere(loaded, drafter, nodes, captured=captured)
        assert all(isinstance(layer, Claimed) for layer in engine.target.pool.layers)
        found = generate(engine, *asked)
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in expected.items()}
    assert drafter != "memory" or sum(one.accepted for one in found.values()) > 0


def test_what_is_checked_and_measured_at_start_is_made_there(loaded: LoadedModel) -> None:
    with claims():
        target = engine_elsewhere(loaded, "none", 2, captured=False).target
        check(target, context=20, steps=3)  # of references it need not be true
        run_point(dummy_texts(target, sequences=2, length=20), Point(2, 20, 7))
