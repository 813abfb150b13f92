"""With `adaptation.enabled: auto` a server learns where it pays: where the target's steps are dear beside the drafter's
blocks, or no drafter serves yet; where answers may be kept; and while there are pauses."""

import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import pytest

from adaptation.config import AdaptationConfig
from benchmarks.__main__ import app as benchmarks
from benchmarks.checkpoint import DRAFTER
from service import doctor
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine import memory_planner
from service.engine.budget import FixedBudget
from service.learning.adaptive import Adaptive
from service.learning.auto import CHEAP, Facts, decide, kept_facts
from service.observability.live import Live
from service.serve import load_model_service
from tests.service.bench.parts import assembled, run_command, save_drafter, save_two_layers, settings_for
from tests.service.learning_parts import requests, texts
from tests.service.test_metrics import made

COPIES = 32  # layers of the deep one for each of the other's
Targets = Mapping[str, tuple[Path, Path]]  # and its drafter, by what a step is beside a block


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Targets:
    folder = tmp_path_factory.mktemp("targets")
    cheap, dear = save_two_layers(folder / "cheap", hidden_size=256, intermediate_size=512), folder / "dear"
    drafter = save_drafter(folder / "drafter", assembled(cheap))
    words = ("--model", cheap, "--drafter-path", drafter, "--state-dir", folder, "--copies", COPIES, "--out", dear)
    assert run_command("checkpoint", "deepened", *words, program=benchmarks)[0] == 0
    return {"cheap": (cheap, drafter), "dear": (dear, dear / DRAFTER)}


def settings(targets: Targets, steps: str, *, drafter: bool = True, **changes: object) -> ServiceConfig:
    """Few sizes are measured. Costs stay with the model, so that only its first start measures them."""
    model, weights = targets[steps]
    few = {"max_sequences": 1, "max_budget": 8, "adaptation": AdaptationConfig()}
    return settings_for(model).model_copy(update={**few, "drafter_path": weights if drafter else None, **changes})


def ask(adaptive: Adaptive, *, pause: float) -> list[bool]:
    """Answer some queries with so many seconds between them. # -> whether each was recorded"""
    for query in requests([[5, 6, 7]] * 3, temperature=0.0, tokens=8):
        texts(adaptive.engine, [query])
        time.sleep(pause)
    heard = [feedback.recorded for feedback in adaptive.worker.inbox.queries]
    adaptive.worker.inbox.queries.clear()
    return heard


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("drafter", [True, False], ids=["drafter", "none"])
@pytest.mark.parametrize("steps", ["dear", "cheap"])
@patch("service.learning.auto.CHEAP", 0.25)  # a block takes some 0.06 and 0.9: times may be off by 4 on a busy machine
def test_it_is_on_where_it_pays(
    targets: Targets, steps: str, drafter: bool, kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(targets, steps, drafter=drafter, memory="auto" if kept else "off")
    with caplog.at_level(logging.INFO):
        served = load_model_service(config, made(), Live())
    on = kept and (steps == "dear" or not drafter)
    assert served.card.learns.startswith("on: " if on else "off: ")
    assert f"learning while serving is {served.card.learns}" in caplog.text
    found = {one.subject: one.text for one in doctor.findings(config)}
    assert found["learning"] == served.card.learns
    assert isinstance(served.adaptation, Adaptive) is on
    if isinstance(adaptive := served.adaptation, Adaptive):
        assert served.card.drafter == "memory+specblock"
        assert ask(adaptive, pause=0.0) == [False] * 3
        assert not adaptive.learner.training.time.pauses.suffice()
        assert ask(adaptive, pause=0.2)[1:] == [True] * 2
        adaptive.worker.start()
        assert adaptive.status().reason == served.card.learns
        adaptive.learner.training.time.pauses.add(3600.0)
        assert adaptive.status().reason == f"{served.card.learns}; waits for idle time"
        assert adaptive.worker.stop()


def calls(assembly: Assembly) -> Counter[str]:
    """Answer two queries again, and count the calls of our own functions above the kernels, which keep what they were
    given by its address, and are called more often where memory was used again."""
    engine, counts = assembly.engine(policy=FixedBudget(8)), Counter[str]()
    asked = requests([[5, 6, 7], [8, 9]], temperature=0.0, tokens=24)
    texts(engine, asked)

    def count(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(Path.cwd()) and not path.is_relative_to(Path.cwd() / "kernels"):
            counts[f"{path.relative_to(Path.cwd())} {frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        texts(engine, asked)
    finally:
        sys.setprofile(None)
    return counts


def test_off_costs_nothing(targets: Targets) -> None:
    """A step calls what it calls in a server that was forbidden to learn."""
    automatic = settings(targets, "cheap").model_copy(update={"drafter": "specblock"})
    forbidden = automatic.model_copy(update={"adaptation": AdaptationConfig(enabled=False)})
    counted = [calls(assemble(config)) for config in (automatic, forbidden)]
    assert not assemble(automatic).learns[0]
    assert counted[0] == counted[1]
    assert counted[0]["service/engine/engine.py Engine.step"] > 8
    assert not [name for name in counted[0] if name.startswith("adaptation/") or "recording" in name]


@pytest.mark.parametrize(
    ("changes", "facts", "on", "words"),
    [
        ({}, Facts(), True, "unless a block"),
        ({}, Facts(block_share=CHEAP), True, "takes 0.15 of a plain step"),
        ({}, Facts(block_share=0.16), False, "takes 0.16 of a plain step, more than 0.15"),
        ({}, Facts(drafts=False, block_share=9.0), True, "made from traffic"),
        ({}, Facts(has_weights=False), False, "no weights"),
        ({}, Facts(has_room=False), False, "free memory"),
        ({"api_keys": "a"}, Facts(), False, "api_keys"),
        ({"memory": "off"}, Facts(drafts=False), False, "memory is off"),
        ({"budget_policy": "fixed"}, Facts(), False, "budget_policy"),
        ({"adaptation": {"policy": "never"}}, Facts(drafts=False), False, "policy is never"),
        ({"adaptation": {"policy": "never", "redis_url": "redis://a"}}, Facts(), True, "redis_url"),
        ({"adaptation": {"redis_url": "redis://a"}}, Facts(block_share=9.0), True, "redis_url"),
        ({"adaptation": {"redis_url": "redis://a", "redis_secret": "x" * 16}}, Facts(block_share=9.0), False, "takes"),
        ({"adaptation": {"enabled": True}, "api_keys": "a", "memory": "off"}, Facts(has_room=False), True, "true"),
        ({"adaptation": {"enabled": True}}, Facts(has_weights=False), False, "no weights"),
        ({"adaptation": {"enabled": False}}, Facts(drafts=False), False, "false"),
    ],
)
def test_each_rule(changes: dict[str, object], facts: Facts, on: bool, words: str) -> None:
    found, reason = decide(ServiceConfig.model_validate(changes), facts)
    assert (found, reason.partition(": ")[0]) == (on, "on" if on else "off")
    assert words in reason


@pytest.mark.parametrize("drafter", [True, False])
def test_no_memory_is_taken_that_is_short(targets: Targets, monkeypatch: pytest.MonkeyPatch, drafter: bool) -> None:
    """A start is then what it is without learning."""
    monkeypatch.setattr(memory_planner, "_LEARNING_SHARE", 1e-9)
    config = settings(targets, "cheap", drafter=drafter)
    assembly = assemble(config)
    assert assembly.learns == (False, "off: it would take more than a quarter of the free memory")
    assert decide(config, kept_facts(config)) == assembly.learns
    assert (assembly.drafter_name, assembly.loaded.initial_drafter) == (
        "memory+specblock" if drafter else "memory",
        None,
    )
