"""A tiny target, texts of its own, and a drafter that was trained until it is good at them.

The texts are recorded once, by the engine that serves; a test that wants a stream of queries draws from them.
"""

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from adaptation.learner import Learner, build_learner
from adaptation.records import Emit
from adaptation.samples import training_sample
from adaptation.timing import completed
from adaptation.weights import ServedDrafter, in_place
from drafters.feedback import QueryFeedback
from drafters.network import checkpoint
from drafters.network.checkpoint import weights_of
from drafters.network.config import config_from
from drafters.network.model import SpecBlock
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.drafter import load_network
from service.engine.requests import GenerationRequest
from service.learning.adaptive import Adaptive, build_adaptive
from tests.service.bench.parts import DRAFT_VOCAB, save_two_layers, settings_for
from tests.service.learning_parts import requests, texts
from tests.tiny_models import VOCAB_SIZE, random_prompts
from tests.tuned import tuned

TOKENS = 24
_PROMPT = 6
_TAPS = (0, 1)
_PRACTICE: dict[str, object] = {
    "policy": "never",
    "full_steps": 64,
    "step_texts": 64,
    "warm_up_steps": 1,
    "learning_rate": 0.005,
    "update_norm": 1.0,
}


def greedy_requests(count: int) -> list[GenerationRequest]:
    prompts = [prompt for seed in range(count) for prompt in random_prompts(1, _PROMPT, seed=seed)]
    return requests(prompts, temperature=0.0, tokens=TOKENS)


@dataclass
class Practised:
    """An assembly whose drafter is the good one, and the texts it is good at, as its engine recorded them."""

    assembly: Assembly
    recorded: list[QueryFeedback]
    first: dict[str, Tensor]  # the weights it was trained from, which are good at nothing

    @property
    def good(self) -> dict[str, Tensor]:
        return weights_of(self.network())

    def network(self) -> SpecBlock:
        """The good drafter, a new one each time."""
        return load_network(Path(str(self.assembly.config.drafter_path)), self.assembly.loaded)

    def stream(self, seed: int, count: int, version: int) -> list[QueryFeedback]:
        """So many queries out of the recorded ones, each as served by this version."""
        drawn = random.Random(seed).choices(self.recorded, k=count)
        return [replace(one, query=replace(one.query, first_version=version, version=version)) for one in drawn]

    def learner(self, folder: Path, emit: Emit, anchor: Mapping[str, Tensor], **knobs: object) -> Learner:
        """One that starts from these weights, and serves no one."""
        serving = self.network()
        with torch.no_grad():
            for name, value in serving.named_parameters():
                value.copy_(anchor[name])
        served = ServedDrafter(
            config=serving.config,
            weights=weights_of(serving),
            target_head=None,
            embedding=None,
            prepare=in_place(serving),
            embed=self.embed,
        )
        config, tuning, policy = tuned(knobs)
        return build_learner(config, served, folder=folder, emit=emit, tuning=tuning, policy=policy)

    def embed(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.embedding(tokens, self.assembly.loaded.parts.embedding)


def practised(folder: Path, *, num_texts: int, updates: int = 3) -> Practised:
    """`updates` of 64 optimizer steps each on `num_texts` texts."""
    settings = settings_for(save_two_layers(folder / "model"))
    plain = assemble(settings.model_copy(update={"drafter": "memory"}))
    asked = greedy_requests(num_texts)
    frequent = Counter(token for text in texts(plain.engine(plain.drafter("none")), asked) for token in text)
    first = _save_first(folder / "first", plain, [token for token, _ in frequent.most_common(DRAFT_VOCAB)])
    weights = {name: value.clone() for name, value in weights_of(first).items()}
    taught, _ = _recorded(_assembly(settings, folder / "first"), folder / "record", asked)
    _practise(taught, first, updates, folder / "good")
    assembly = _assembly(settings, folder / "good")
    served, recorded = _recorded(assembly, folder / "again", asked)
    served.worker.stop()
    taught.worker.stop()
    return Practised(assembly, recorded, weights)


def _assembly(settings: ServiceConfig, drafter: Path) -> Assembly:
    chosen = {"drafter": "specblock", "drafter_path": drafter, "budget_policy": "fixed"}
    return assemble(settings.model_copy(update=chosen))


def _save_first(folder: Path, assembly: Assembly, frequent: list[int]) -> SpecBlock:
    """Random weights, of which a checkpoint keeps every bit, and the most frequent tokens."""
    torch.manual_seed(0)
    loaded = assembly.loaded
    described = loaded.model.config.get_text_config().to_dict()
    sizes = {"target": described, "tap_layers": _TAPS, "draft_vocab_size": DRAFT_VOCAB, "rank_hidden": 16}
    model = SpecBlock(config_from(sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            parameter.copy_(parameter.bfloat16())
    others = [token for token in range(VOCAB_SIZE) if token not in frequent]
    model.set_vocabulary(torch.tensor(sorted((frequent + others)[:DRAFT_VOCAB])))
    checkpoint.save(folder, model, target_identity=loaded.parts.identity, facts={}, own_head=True)
    return model


def _recorded(assembly: Assembly, folder: Path, asked: list[GenerationRequest]) -> tuple[Adaptive, list[QueryFeedback]]:
    """What an engine tells a learner that never listens."""
    config, tuning, _ = tuned({**_PRACTICE, "queued_queries": len(asked)})
    mine = replace(assembly, config=assembly.config.model_copy(update={"adaptation": config}))
    adaptive = build_adaptive(mine, folder=folder, emit=lambda event: None, tuning=tuning)
    texts(adaptive.engine, asked)
    return adaptive, sorted(adaptive.worker.inbox.queries, key=lambda feedback: list(feedback.query.tokens))


def _practise(adaptive: Adaptive, model: SpecBlock, updates: int, folder: Path) -> None:
    samples = [training_sample(feedback, most_rejected=32) for feedback in adaptive.worker.inbox.queries]
    for _ in range(updates):
        assert completed(adaptive.learner.training.trainer.update("full", samples)).applied
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(adaptive.learner.weights.training.get_parameter(name))
    identity = adaptive.loaded.parts.identity
    checkpoint.save(folder, model, target_identity=identity, facts={}, own_head=True)
