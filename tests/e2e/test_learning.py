"""Learning while serving, from the request to the published weights, with the real learning thread; and the text of
plain decoding throughout."""

from pathlib import Path

import pytest

from adaptation.records import Event
from service.assembly import Assembly
from tests.service.bench.parts import varied_prompts
from tests.service.learning_parts import assembled, learning, requests, texts
from tests.tuned import settled

PATIENCE_SECONDS = 30.0
ROUNDS = 12


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> Assembly:
    return assembled(tmp_path_factory.mktemp("tiny"), "specblock")  # memory would ask it only while that pays


@pytest.mark.parametrize("policy", ["head_only", "full_only"])
def test_traffic_becomes_weights_and_texts_stay_plain(assembly: Assembly, tmp_path: Path, policy: str) -> None:
    events: list[Event] = []
    asked = requests(varied_prompts()[:8], temperature=0.0, tokens=32)
    plain = texts(assembly.engine(assembly.drafter("none")), asked)
    versions = [0]
    with learning(assembly, tmp_path, events=events, policy=policy) as adaptive:
        while versions[-1] == 0 and len(versions) <= ROUNDS:
            assert texts(adaptive.engine, asked) == plain
            assert settled(adaptive.worker, PATIENCE_SECONDS)
            adaptive.engine.step()
            versions.append(adaptive.engine.drafter.version)
        assert texts(adaptive.engine, asked) == plain
        assert settled(adaptive.worker, PATIENCE_SECONDS)
        adaptive.engine.step()
        versions.append(adaptive.engine.drafter.version)  # the last round may have brought another one
        status = adaptive.status()
    assert status.publishes >= 1, events
    assert versions == sorted(versions)
    assert status.version == versions[-1] > 0
    assert status.origin == status.version or status.condemned, "what was taken back is named"
    assert sum(status.updates.values()) >= status.publishes
    assert status.queries_observed == len(asked) * (len(versions) - 1)
    assert status.failures == {}
