"""Finished queries made to order for a tiny drafter, and a learner that is fed with them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from adaptation.config import AdaptationConfig, Tuning
from adaptation.learner import Learner, build_learner
from adaptation.policy import Bandit
from adaptation.publisher import Publisher
from adaptation.records import Event
from adaptation.samples import SampleBuffers, TrainingSample, training_sample
from adaptation.timing import TrainingTime
from adaptation.trainer import OnlineTrainer
from adaptation.weights import DrafterWeights, ServedDrafter, in_place
from drafters.feedback import DraftLabels, Query, QueryFeedback
from drafters.memory.past import _prior
from drafters.network.checkpoint import weights_of
from drafters.network.model import SpecBlock
from drafters.training.corpus import TOP
from kernels.memory import ORDERS, WAYS
from kernels.sample import gumbel_noise_of
from tests.drafters.network.parts import DRAFT_VOCAB, target_config, tiny_drafter, tiny_embedding, tiny_table
from tests.tiny_models import VOCAB_SIZE
from tests.tuned import QUICK, tuned

HIDDEN, PROMPT, ANSWER = 48, 4, 16
EMBED, TABLE = tiny_embedding(HIDDEN), tiny_table(HIDDEN)
HEAD = torch.randn(VOCAB_SIZE, HIDDEN, generator=torch.Generator().manual_seed(5))  # the target's rows


def drafter(seed: int = 0) -> SpecBlock:
    """The same one every time: describing its target for the first time draws random numbers."""
    target_config("llama")
    return tiny_drafter(seed=seed)


@cache
def vocabulary() -> tuple[Tensor, Tensor]:
    """Target ids of draft tokens, and draft ids of target tokens."""
    model = drafter()
    return model.d2t, model.t2d


def query(
    tokens: list[int],
    *,
    num_prompt: int = 0,
    version: int = 0,
    accepted: tuple[int, ...] = (1, 2),
    client: str = "a",
) -> Query:
    return Query(
        row=0,
        tokens=tokens,
        num_prompt=num_prompt,
        client=client,
        store=True,
        temperature=0.0,
        seed=7,
        first_version=version,
        version=version,
        accepted=accepted,
        plain_steps=0,
        seconds=0.5,
    )


def feedback(
    seed: int,
    *,
    token: int | None = None,
    version: int = 0,
    client: str = "a",
    accepted: tuple[int, ...] = (1, 2),
    rejected: int = 12,
    answer: int = ANSWER,
    store: bool = True,
) -> QueryFeedback:
    """A query whose answer is random tokens, or one token throughout which the target is nearly sure of."""
    generator = torch.Generator().manual_seed(seed)
    d2t, _ = vocabulary()
    spoken = d2t[torch.randint(DRAFT_VOCAB, (answer,), generator=generator)]
    if token is not None:
        spoken = torch.full((answer,), token)
    tokens = [*torch.randint(VOCAB_SIZE, (PROMPT,), generator=generator).tolist(), *spoken.tolist()]
    logits = torch.randn(answer, VOCAB_SIZE, generator=generator)
    logits[torch.arange(answer), spoken] += 12.0
    top = logits.log_softmax(-1).topk(TOP)
    draft_labels = DraftLabels(
        positions=PROMPT + torch.arange(answer),
        states=torch.randn(answer, HIDDEN, generator=generator),
        tokens=spoken,
        chances=0.5 * torch.rand(answer, generator=generator),
        rejected=torch.arange(answer) < rejected,
        top_ids=top.indices.to(torch.int32),
        top_logprobs=top.values.to(torch.float16),
    )
    return QueryFeedback(
        query=replace(query(tokens, num_prompt=PROMPT, version=version, accepted=accepted, client=client), store=store),
        prompt=PROMPT,
        first=0,
        features=torch.randn(PROMPT + answer - 1, 3 * HIDDEN, generator=generator),
        top_ids=draft_labels.top_ids,
        top_logprobs=draft_labels.top_logprobs,
        draft_labels=draft_labels,
        ready=None,
    )


def beside_memory(made: QueryFeedback) -> QueryFeedback:
    """The query, served beside a memory without past answers."""
    lines = torch.zeros(len(made.top_ids), len(ORDERS), WAYS, dtype=torch.int64)
    return replace(made, past=lines, regression=torch.stack([_prior(), torch.full_like(_prior(), 20.0)]))


def sampled(seed: int, *, temperature: float = 1.0, answer: int = 64, offset: int = 1000) -> QueryFeedback:
    """A query of which the draft head knows the target's distribution: each token is the first by the drafter's scores
    with the noise that sampled it, and has any rank without."""
    model, heard = drafter(), feedback(seed, answer=answer)
    logits = model.lm_head(heard.draft_labels.states)
    positions = offset + heard.draft_labels.positions
    noise = gumbel_noise_of(torch.full_like(positions, seed), positions, model.d2t)
    spoken = model.d2t[(logits / temperature + noise).argmax(-1)]
    top = logits.log_softmax(-1).topk(TOP)
    labels = replace(
        heard.draft_labels,
        tokens=spoken,
        top_ids=model.d2t[top.indices].to(torch.int32),
        top_logprobs=top.values.to(torch.float16),
    )
    tokens = [*heard.query.tokens[:PROMPT], *spoken.tolist()]
    reported = replace(heard.query, tokens=tokens, temperature=temperature, seed=seed, offset=offset)
    return replace(heard, query=reported, draft_labels=labels, top_ids=labels.top_ids, top_logprobs=labels.top_logprobs)


def undrafted(seed: int, *, token: int | None = None, steps: int = ANSWER) -> QueryFeedback:
    """A query of plain steps."""
    heard = feedback(seed, token=token, rejected=0, accepted=())
    nothing = torch.zeros(heard.draft_labels.count, dtype=torch.bool)
    return replace(heard, draft_labels=heard.draft_labels.take(nothing), query=replace(heard.query, plain_steps=steps))


def samples(count: int, *, token: int | None = None) -> list[TrainingSample]:
    return [training_sample(feedback(seed, token=token), most_rejected=32) for seed in range(count)]


@dataclass
class Bench:
    """A learner on a tiny drafter, and all it reported."""

    learner: Learner
    weights: DrafterWeights
    serving: SpecBlock
    events: list[Event]
    config: AdaptationConfig
    drafter: ServedDrafter
    tuning: Tuning

    def observe(self, made: Callable[..., QueryFeedback], seed: int, **reported: object) -> None:
        self.learner.observe(made(seed, version=self.weights.version, **reported))

    def update(self) -> bool:
        """Score what waits, and do the update that is due to its end. # -> whether there was one"""
        score(self.learner)
        was_due = self.learner.work()
        while self.learner._job is not None:
            self.learner.work()
        return was_due

    @property
    def buffers(self) -> SampleBuffers:
        return self.learner.feedback.buffers

    @property
    def policy(self) -> Bandit:
        return self.learner._policy

    @property
    def publisher(self) -> Publisher:
        return self.learner._publisher

    @property
    def trainer(self) -> OnlineTrainer:
        return self.learner.training.trainer

    @property
    def time(self) -> TrainingTime:
        return self.learner.training.time

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


def score(learner: Learner) -> None:
    """Score the texts that wait for it."""
    while learner._publisher.monitor.unscored or learner._publisher.monitor.scoring is not None:
        learner.work()


def full_bench(folder: Path, **knobs: object) -> Bench:
    """One of full updates that change much: six large steps on four texts."""
    large: dict[str, object] = {"full_steps": 6, "step_texts": 64, "warm_up_steps": 1, "learning_rate": 0.01}
    return bench(folder, **{"policy": "full_only", "full_queries": 4, **large, **knobs})


def bench(folder: Path, **knobs: object) -> Bench:
    """Quick to decide: always updates, gates on four texts. With `made` False the drafter is made of texts first."""
    made = bool(knobs.pop("made", True))
    config, tuning, policy = tuned({**QUICK, **knobs})
    serving = drafter()
    events: list[Event] = []
    served = ServedDrafter(
        config=serving.config,
        weights=weights_of(serving),
        target_head=HEAD,
        embedding=TABLE,
        prepare=in_place(serving),
        embed=EMBED,
        made=made,
    )
    learner = build_learner(config, served, folder=folder, emit=events.append, tuning=tuning, policy=policy)
    return Bench(learner, learner.weights, serving, events, config, served, tuning)
