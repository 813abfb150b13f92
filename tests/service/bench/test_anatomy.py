"""Where a step's time goes: every second belongs to one part, and being watched changes no text."""

from dataclasses import replace
from itertools import count

import pytest
import torch

from drafters.gating import AskGate
from kernels import ops
from service.assembly import Assembly, assemble
from service.bench.anatomy import PARTS, Clock, milliseconds, timed_ops
from service.bench.driver import TimedStep
from service.bench.experiment import Measure
from service.bench.speed import contestants_of, measure_set
from service.config import ServiceConfig
from service.engine.sampling import EAGER_SAMPLER
from service.errors import StartupError
from service.prompts import PromptSet
from tests.service.bench.parts import varied_prompts
from tests.service.bench.test_load import STEP


def test_a_call_within_another_belongs_to_the_outer_one() -> None:
    ticks = count()
    clock = Clock(now=lambda: float(next(ticks)))
    inner = clock.timed("inner", lambda: next(ticks))
    outer = clock.timed("outer", lambda: inner() and inner())
    outer()
    assert clock.take() == {"outer": 3.0}
    inner()
    assert clock.take() == {"inner": 2.0}
    assert clock.take() == {}


def test_a_call_that_fails_is_timed_too() -> None:
    clock = Clock(now=lambda: 0.0)
    with pytest.raises(ZeroDivisionError):
        clock.timed("part", lambda: 1 // 0)()
    clock.timed("other", lambda: None)()
    assert clock.take() == {"part": 0.0, "other": 0.0}


def test_milliseconds_are_of_steps_that_read_no_prompt() -> None:
    decoding = replace(STEP, prompt_tokens=0)
    steps = [TimedStep(decoding, 1.0, parts={"products": seconds}) for seconds in (0.25, 0.75)]
    reading = TimedStep(replace(STEP, prompt_tokens=5), 1.0, parts={"products": 9.0})
    assert milliseconds([*steps, reading]) == {**dict.fromkeys(PARTS, 0.0), "products": 500.0}
    assert milliseconds([reading, TimedStep(decoding, 1.0)]) == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_parts_make_up_the_step_and_change_no_token(
    trained_assembly: Assembly, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AskGate, "took", lambda *told, **more: None)  # who knows no times asks everybody
    table = ops.on(torch.device("cpu"))
    before = dict(vars(table)), dict(vars(EAGER_SAMPLER))
    prompts, measure = PromptSet("some", tuple(map(tuple, varied_prompts()[:2]))), Measure(temperature, 16, 1, seed=0)
    unwatched = measure_set(prompts, contestants_of(trained_assembly), measure)
    with timed_ops(trained_assembly.config) as clock:
        contestants = contestants_of(assemble(trained_assembly.config), clock=clock)
        row = measure_set(prompts, contestants, measure)
    assert (vars(table), vars(EAGER_SAMPLER)) == before
    assert row["mismatched_tokens"] == 0
    assert row["tau"] == unwatched["tau"]
    plain, drafted = row["milliseconds"]["plain"], row["milliseconds"]["speculative"]
    assert tuple(plain) == tuple(drafted) == PARTS
    assert all(value > 0 for value in drafted.values())
    assert all(value > 0 for part, value in plain.items() if part != "drafting")
    assert 1000 / sum(plain.values()) == pytest.approx(row["plain_decode_tokens_per_second"])
    assert unwatched["milliseconds"] == {"plain": {}, "speculative": {}}


def test_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    with pytest.raises(StartupError, match="--device cpu"), timed_ops(ServiceConfig(device="auto")):
        pass


def test_the_drafters_calls_are_its_own_part(trained_assembly: Assembly) -> None:
    clock = Clock()
    drafter = clock.timed_drafter(trained_assembly.drafter())
    drafter.start([])
    assert list(clock.take()) == ["drafting"]
