"""The judge replays what the engine served: the same steps, from what was recorded of them."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from adaptation.samples import example_of
from benchmarks.curves import Collector
from drafters.training.replay import replay_served
from kernels.layers import Embedding
from service.bench.driver import ClosedLoop, generate
from service.engine.budget import FixedBudget
from tests.service.learning_parts import assembled, built, requests

NODES, TOKENS = 6, 48


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replayed_steps_are_about_those_that_were_served(temperature: float, tmp_path: Path) -> None:
    """Not replayed are choices after rejected nodes, which a small target of random weights makes again: some 8 % of
    the steps here. Texts that took many steps take many."""
    assembly, drawn = assembled(tmp_path), random.Random(0)
    adaptive = built(assembly, tmp_path / "state", budget=FixedBudget(NODES))
    adaptive.worker.loop = collector = Collector()
    adaptive.worker.start()
    # A drafter that is not given the seconds of its steps asks its network in all of them.
    vars(adaptive.engine.drafter)["timed"] = lambda times: None
    phrases = [[drawn.randrange(5, 200) for _ in range(6)] for _ in range(4)]
    prompts = [[token for _ in range(4) for token in drawn.choice(phrases)] for _ in range(10)]
    asked = requests(prompts, temperature=temperature, tokens=TOKENS)
    later = [replace(one, request_id=f"later {one.request_id}") for one in asked]
    runs = [generate(adaptive.engine, queries, ClosedLoop(1)) for queries in (asked, later)]
    adaptive.worker.ask(lambda: None).result()
    served = [len(answer.accepted_per_step) for run in runs for answer in run.answers]
    embed, model = Embedding(assembly.loaded.parts.embedding), adaptive.learner.weights.replica
    texts = [example_of(feedback) for feedback in collector.queries]
    adaptive.stop()
    replayed = []
    for text in texts:
        assert text is not None
        assert text.memory is not None
        assert 1 <= text.memory.nodes <= NODES
        replayed.append(replay_served(model, embed, text).steps)
    assert sum(replayed) == pytest.approx(sum(served), rel=0.12)
    assert np.corrcoef(served, replayed)[0, 1] > 0.9
    assert sum(replayed[10:]) < 0.8 * sum(replayed[:10]), "what was answered before is drafted from the record"
