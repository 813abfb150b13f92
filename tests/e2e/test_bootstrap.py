"""A drafter for a model that comes without one, made from its own traffic: of three families, with windows and other
norms, text by text as without it; killed at any time; and one that was made for another target."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from adaptation.checkpoint import SnapshotRing
from adaptation.config import AdaptationConfig
from adaptation.persistence import LearnerCheckpoint
from adaptation.records import Event, NotStored
from drafters.network import checkpoint
from drafters.network.checkpoint import weights_of
from drafters.network.model import SpecBlock
from service.assembly import Assembly, assemble
from service.config import ServiceConfig
from service.engine.requests import GenerationRequest
from service.learning.adaptive import Adaptive, learning_folder
from tests.service.bench.parts import settings_for
from tests.service.learning_parts import learning, requests, texts
from tests.taught import speech, taught_model
from tests.tuned import settled

PATIENCE_SECONDS = 60.0
TOGETHER = 8
OTHERS = pytest.mark.slow("of each family one is taught first", covers="adaptation/bootstrap.py drafters/network")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = str(request.param)
    return llama if family == "llama" else taught_model(family, tmp_path_factory.mktemp(family))


def settings(folder: Path, **changes: object) -> ServiceConfig:
    # Without past answers: in so few words these foretell all that a network could.
    chosen = {
        "drafter": "auto",
        "memory": "off",
        "budget_policy": "fixed",
        "adaptation": AdaptationConfig(enabled=True),
        **changes,
    }
    return settings_for(folder).model_copy(update=chosen)


def asked(count: int, temperature: float = 0.9) -> list[GenerationRequest]:
    prompts = [tuple(line.tolist()) for line in speech(count, 12, torch.Generator().manual_seed(3))]
    return requests(prompts, temperature=temperature, tokens=48)


def rounds(adaptive: Adaptive, queries: Sequence[GenerationRequest]) -> Iterator[list[tuple[int, ...]]]:
    """Their texts, some at a time; after each piece what was learnt of it is served."""
    for first in range(0, len(queries), TOGETHER):
        yield texts(adaptive.engine, queries[first : first + TOGETHER])
        assert settled(adaptive.worker, PATIENCE_SECONDS)
        adaptive.engine.step()


@pytest.mark.parametrize(
    ("folder", "temperature"),
    [
        ("llama", 0.0),
        ("llama", 0.9),
        *(pytest.param(family, heat, marks=OTHERS) for family in ("qwen3", "gemma3") for heat in (0.0, 0.9)),
    ],
    indirect=["folder"],
)
def test_traffic_makes_a_drafter_and_changes_no_text(folder: Path, tmp_path: Path, temperature: float) -> None:
    assembly = assemble(settings(folder))
    queries = asked(64, temperature)
    plain = texts(assembly.engine(assembly.drafter("none")), queries)
    events: list[Event] = []
    with learning(assembly, tmp_path, events=events) as adaptive:
        reported = [text for part in rounds(adaptive, queries) for text in part]
        status = adaptive.status()
        credits = adaptive.engine.drafter.credits()
    assert reported == plain
    assert status.failures == {}
    assert status.version >= 1, events
    made = next(event for event in events if event.kind == "published")
    assert made.numbers["made"] == 1
    assert made.numbers["candidate"] > made.numbers["serving"]
    assert credits["specblock"] > 0


def test_a_policy_that_never_learns_makes_none(llama: Path, tmp_path: Path) -> None:
    assembly = assemble(settings(llama))
    with learning(assembly, tmp_path, policy="never") as adaptive:
        for _ in rounds(adaptive, asked(32)):
            pass
        assert (adaptive.status().version, adaptive.status().phase) == (0, "learning")


def test_texts_that_must_not_be_stored_make_none(llama: Path, tmp_path: Path) -> None:
    assembly = assemble(settings(llama))
    with learning(assembly, tmp_path) as adaptive:
        for _ in rounds(adaptive, [replace(one, store=False) for one in asked(24)]):
            pass
        assert adaptive.status().collected_positions == 0


def test_what_was_made_is_served_after_a_restart(llama: Path, tmp_path: Path) -> None:
    assembly = assemble(settings(llama))
    with learning(assembly, tmp_path) as adaptive:
        for _ in rounds(adaptive, asked(64)):
            pass
        served = adaptive.learner.weights.latest
        anchor = {name: value.clone() for name, value in weights_of(adaptive.learner.weights.anchor).items()}
    assert served.origin >= 1
    with learning(assembly, tmp_path) as again:
        again.engine.step()
        weights = again.learner.weights
        assert weights.latest.origin == served.origin
        assert all(torch.equal(value, served.weights[name]) for name, value in weights.latest.weights.items())
        assert all(torch.equal(value, anchor[name]) for name, value in weights_of(weights.anchor).items())


def test_a_rollback_to_no_drafter_collects_anew(llama: Path, tmp_path: Path) -> None:
    assembly = assemble(settings(llama))
    with learning(assembly, tmp_path) as adaptive:
        queries = asked(64)
        for _ in rounds(adaptive, queries):
            if adaptive.status().origin:
                break
        assert settled(adaptive.worker, PATIENCE_SECONDS)
        adaptive.engine.step()
        while adaptive.status().origin:
            adaptive.rollback()
            adaptive.engine.step()
        status = adaptive.status()
        assert (status.phase, status.collected_positions) == ("collecting", 0)
        asked_before = adaptive.engine.drafter.num_blocks
        assert texts(adaptive.engine, queries[:4]) == texts(assembly.engine(assembly.drafter("none")), queries[:4])
        assert adaptive.engine.drafter.num_blocks == asked_before


@pytest.mark.parametrize("refusing", [LearnerCheckpoint, SnapshotRing], ids=["sums", "everything"])
def test_a_full_disk_costs_no_text(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: type[LearnerCheckpoint | SnapshotRing]
) -> None:
    """Without sums on disk a drafter is made as well; without versions none is served, and the reason is reported."""

    def full(*given: object, **named: object) -> None:
        raise NotStored("no space left")

    monkeypatch.setattr(refusing, "save_tensors" if refusing is LearnerCheckpoint else "add", full)
    assembly = assemble(settings(llama))
    queries, events = asked(48), list[Event]()
    with learning(assembly, tmp_path, events=events) as adaptive:
        reported = [text for part in rounds(adaptive, queries) for text in part]
        status = adaptive.status()
    assert reported == texts(assembly.engine(assembly.drafter("none")), queries)
    assert status.failures == {}
    assert any(event.kind == "not_stored" for event in events)
    assert (status.version > 0) == (refusing is LearnerCheckpoint)


def test_a_target_that_changed_on_disk_has_learning_of_its_own(llama: Path, tmp_path: Path) -> None:
    """What was learnt beside other weights is not taken up."""
    other = copytree(llama, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"][0] += 1.0
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    folders = {learning_folder(tmp_path, assemble(settings(model)).loaded, None) for model in (llama, other)}
    assert len(folders) == 2


_CHILD = """
import sys
from pathlib import Path
from tests.e2e.test_bootstrap import serve_until_killed
serve_until_killed(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def serve_until_killed(model: Path, state: Path) -> None:
    """Answers for ever, and says after each piece how much it has."""
    torch.set_num_threads(1)
    assembly = assemble(settings(model))
    with learning(assembly, state) as adaptive:
        while True:
            for _ in rounds(adaptive, asked(64)):
                status = adaptive.status()
                print(status.collected_positions, status.newest, flush=True)


@pytest.mark.parametrize("pieces", [4, *(pytest.param(pieces, marks=pytest.mark.slow) for pieces in (1, 2))])
def test_killed_it_resumes(llama: Path, tmp_path: Path, pieces: int) -> None:
    """While it collects, about when it solves and judges, and when it learns."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, llama, tmp_path], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    )
    assert process.stdout is not None
    positions = newest = 0
    for line in (process.stdout.readline() for _ in range(pieces)):
        positions, newest = map(int, line.split())
    time.sleep(0.05 * pieces)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    with learning(assemble(settings(llama)), tmp_path) as adaptive:
        status = adaptive.status()
        assert status.newest >= newest
        assert status.collected_positions or status.newest or not positions
        for _ in rounds(adaptive, asked(64)):
            pass
        assert adaptive.status().version >= 1
        assert adaptive.status().failures == {}


def exported(assembly: Assembly, folder: Path, network: SpecBlock, identity: str) -> Path:
    checkpoint.save(folder, network, target_identity=identity, facts={}, own_head=True)
    return folder


def made_drafter(assembly: Assembly, folder: Path) -> SpecBlock:
    with learning(assembly, folder) as adaptive:
        for _ in rounds(adaptive, asked(64)):
            pass
        assert adaptive.status().origin >= 1
        return adaptive.learner.weights.served_in_full()


def test_a_drafter_of_a_sister_serves_once_it_has_proved_itself(llama: Path, tmp_path: Path) -> None:
    assembly = assemble(settings(llama))
    drafter = exported(assembly, tmp_path / "drafter", made_drafter(assembly, tmp_path / "made"), "a fine-tune of it")
    transferred = assemble(settings(llama, drafter_path=drafter))
    queries, events = asked(48), list[Event]()
    with learning(transferred, tmp_path / "state", events=events) as adaptive:
        reported = [text for part in rounds(adaptive, queries) for text in part]
    assert reported == texts(transferred.engine(transferred.drafter("none")), queries)
    first = next(event for event in events if event.kind in ("published", "refused"))
    assert (first.kind, first.version) == ("published", 1), events


def test_a_useless_drafter_of_a_sister_is_refused_and_another_made(llama: Path, tmp_path: Path) -> None:
    assembly = assemble(settings(llama))
    network = made_drafter(assembly, tmp_path / "made")
    with torch.no_grad():
        network.lm_head.weight.copy_(network.lm_head.weight.flip(0))
    drafter = exported(assembly, tmp_path / "drafter", network, "a fine-tune of it")
    events = list[Event]()
    with learning(assemble(settings(llama, drafter_path=drafter)), tmp_path / "state", events=events) as adaptive:
        for _ in rounds(adaptive, asked(96, 0.0)):  # above 0 the noise alone is a good guess for so flat a target
            pass
        status = adaptive.status()
    judged = [event.kind for event in events if event.kind in ("published", "refused") and event.numbers.get("made")]
    assert judged[:2] == ["refused", "published"], events
    assert status.version >= 1
