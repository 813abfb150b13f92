"""New weights in the middle of answers, as fast as another thread can publish them: every step sees one version, and
not one token is another."""

import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from adaptation.config import Tuning
from adaptation.weights import DrafterWeights
from drafters.training.output_layers import OUTPUT_LAYERS
from kernels.lattice import BlockNetwork, BlockTables, GrowBlock, GrownTree, HostSizes, Keys
from kernels.ops import Ops
from service.assembly import Assembly, assemble
from service.bench.driver import generate
from service.bench.lossless import BUILT_IN
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest
from service.learning.adaptive import Adaptive, build_adaptive
from service.text.prompts import read_prompt_set
from tests.service.bench.parts import varied_prompts
from tests.service.learning_parts import assembled, requests, texts

GREEDY = pytest.mark.slow("warm texts show more", covers="adaptation/weights.py adaptation/publisher.py")
SEQUENCES = 4
TOKENS = 96
SCARCE_SLOTS = 300
EMBEDDED_SLOTS = 360  # too few for four of its texts


@dataclass
class Seen:
    """What each step's forwards of the drafter were computed with."""

    step: int = 0
    by_step: defaultdict[int, set[tuple[int, float]]] = field(default_factory=lambda: defaultdict(set))

    def watch(self, adaptive: Adaptive) -> None:
        network, plan_growth = adaptive.network, adaptive.network.ops.plan_growth

        def plan(weights: BlockNetwork, tables: BlockTables, max_nodes: int) -> GrowBlock:
            grow, first = plan_growth(weights, tables, max_nodes), float(weights.rank_norm[0])  # as it was published

            assert grow is not None, "this network grows by one op"

            def note(keys: Keys, sizes: HostSizes) -> GrownTree:
                self.by_step[self.step].add((adaptive.learner.weights.version, first))
                return grow(keys, sizes)

            return note

        network.ops = Ops(**{**vars(network.ops), "plan_growth": plan})

    def check(self) -> int:
        """The number of versions that drafted. Each step had one, each version one set of weights, in order."""
        assert all(len(versions) == 1 for versions in self.by_step.values())
        ordered = [next(iter(versions)) for _, versions in sorted(self.by_step.items())]
        assert [version for version, _ in ordered] == sorted(version for version, _ in ordered)
        assert len({version for version, _ in ordered}) == len(set(ordered))
        return len(set(ordered))


@contextmanager
def publishing(weights: DrafterWeights, seed: int, parts: tuple[str, ...]) -> Iterator[None]:
    """Publish weights, of these parts randomly perturbed ones, whenever the last ones have reached the engine."""
    done = threading.Event()
    generator = torch.Generator().manual_seed(seed)
    anchor = dict(weights.anchor.named_parameters())

    def publish() -> None:
        while not done.is_set():
            if weights.pending:
                done.wait(0.0002)
                continue
            with torch.no_grad():
                for name, value in weights.training.named_parameters():
                    if name.startswith(parts):
                        value.copy_(anchor[name] + 0.3 * torch.randn(value.shape, generator=generator))
            weights.publish({})

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def serve(
    adaptive: Adaptive,
    asked: list[GenerationRequest],
    plain: list[tuple[int, ...]],
    publishes: int,
    parts: tuple[str, ...],
) -> dict[str, int]:
    """Answer the same requests over and over while weights change. # -> how often what happened"""
    seen, preemptions, tokens = Seen(), 0, 0
    seen.watch(adaptive)

    def count(_: int) -> None:
        seen.step += 1

    with publishing(adaptive.learner.weights, publishes, parts):
        while adaptive.learner.weights.version < publishes:
            run = generate(adaptive.engine, asked, before_step=count)
            assert [answer.token_ids for answer in run.answers] == plain
            preemptions += sum(step.stats.preemptions for step in run.steps)
            tokens += run.num_tokens
    versions = seen.check()
    assert versions > publishes / 10
    published = adaptive.learner.weights.version
    return {"publishes": published, "versions_seen": versions, "tokens": tokens, "preemptions": preemptions}


def publish_in_mid_stream(
    assembly: Assembly,
    folder: Path,
    temperature: float,
    publishes: int,
    *,
    parts: tuple[str, ...] = ("",),
    prompts: Sequence[Sequence[int]] = varied_prompts(),
    slots: int = SCARCE_SLOTS,
) -> dict[str, int]:
    """`parts` are the beginnings of the names of the weights that change; an empty one begins them all."""
    asked = requests(prompts[:SEQUENCES], temperature=temperature, tokens=TOKENS)
    plain = texts(assembly.engine(assembly.drafter("none")), asked)
    limits, tuning = replace(assembly.limits, num_slots=slots), Tuning(snapshots=1)
    adaptive = build_adaptive(assembly, folder=folder, emit=lambda event: None, limits=limits, tuning=tuning)
    reported = serve(adaptive, asked, plain, publishes, parts)
    assert reported["preemptions"] > 0
    return reported


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    """Of the network alone: beside the memory, one of random weights would soon be let sleep."""
    return assembled(tmp_path_factory.mktemp("tiny"), "specblock")


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.mark.parametrize("publishes", [100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=GREEDY), 1.0])
def test_texts_are_plain_whatever_is_published(
    assembly: Assembly,
    tmp_path: Path,
    temperature: float,
    publishes: int,
    sized: Callable[[int], int],
    tell: Callable[..., None],
) -> None:
    tell(**publish_in_mid_stream(assembly, tmp_path, temperature, sized(publishes)))


@pytest.mark.slow
def test_texts_of_the_embedded_model_are_plain_whatever_heads_are_published(
    tmp_path: Path, sized: Callable[[int], int], tell: Callable[..., None]
) -> None:
    assembly = assemble(ServiceConfig(device="cpu", drafter="specblock", budget_policy="fixed", max_budget=16))
    prompts = read_prompt_set(BUILT_IN, assembly.tokenizer).prompts
    reported = publish_in_mid_stream(
        assembly, tmp_path, 0.7, sized(1_000), parts=OUTPUT_LAYERS, prompts=prompts, slots=EMBEDDED_SLOTS
    )
    tell(**reported)
