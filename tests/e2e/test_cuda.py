"""The engine, its graphs, its memory and learning beside it on a CUDA device; see docs/gpu.md for what is confirmed."""

import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from adaptation.worker import low_priority_stream
from drafters.protocol import Committed, DraftContext, Noise, Read
from drafters.tree import DraftTree, VerifyResult
from kernels.sample import hash_bits
from service.assembly import Assembly, assemble
from service.bench.lossless import BUILT_IN, check
from service.config import ServiceConfig
from service.engine.memory_planner import memory_for
from service.engine.requests import SamplingParams
from service.engine.thread import serving
from service.errors import StartupError
from service.learning.adaptive import Adaptive
from service.text.prompts import read_prompt_set
from tests.service.bench.parts import save_drafter
from tests.service.engine.harness import Generated, ask, bytes_of, generate, greedy, request, sampled
from tests.service.engine.test_sequence import scores_of
from tests.service.learning_parts import learning, requests, texts
from tests.tiny_models import random_prompts, stock, tiny_model
from tests.tuned import settled

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
_LONG = 200_000_000  # cycles of a device


def settings(folder: Path, **values: object) -> ServiceConfig:
    given = {"model": str(folder), "device": "cuda", "load_dtype": "float32", "kv_cache": "512MiB"}
    return ServiceConfig.model_validate(
        {**given, "max_model_len": 512, "state_dir": folder / "state", "max_sequences": 8, **values}
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def assembly(folder: Path) -> Iterator[Assembly]:
    with serving(DEVICE):
        yield assemble(settings(folder))


def test_hash_bits_are_those_of_the_cpu() -> None:
    keys = torch.randint(-(2**31), 2**31 - 1, (7, 2), dtype=torch.int32)
    tokens = torch.arange(49_152, dtype=torch.int32)
    assert torch.equal(hash_bits(keys, tokens), hash_bits(keys.cuda(), tokens.cuda()).cpu())


def test_forwards_are_captured_and_rows_independent(assembly: Assembly) -> None:
    assert assembly.target.capture is not None
    assert assembly.numerics == "exact"


def test_every_way_of_decoding_gives_the_same_text(assembly: Assembly) -> None:
    prompts = [prompt[:200] for prompt in read_prompt_set(BUILT_IN, assembly.tokenizer).prompts]
    assert check(assembly, prompts, num_tokens=20_000, seed=0).holds


@pytest.mark.parametrize("params", [greedy(), sampled(3)], ids=["greedy", "sampled"])
def test_graphs_change_nothing(folder: Path, assembly: Assembly, params: SamplingParams) -> None:
    as_they_are = assemble(settings(folder), graphs=False)
    assert as_they_are.target.capture is None
    asked = [request(str(n), prompt, params) for n, prompt in enumerate(random_prompts(6, 40))]
    found, expected = generate(assembly.engine(), *asked), generate(as_they_are.engine(), *asked)
    assert {key: one.tokens for key, one in found.items()} == {key: one.tokens for key, one in expected.items()}


def test_prompts_are_scored_as_by_the_plain_model(folder: Path, assembly: Assembly) -> None:
    (prompt,) = random_prompts(1, 40)
    asked = replace(request("0", prompt, replace(greedy(4), num_logprobs=1)), scores_prompt=True)
    (scores,) = scores_of(assembly.engine(), asked).values()
    expected = stock(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for place, score in enumerate(scores):
        assert score.logprob == pytest.approx(float(expected[place, prompt[place + 1]]), abs=1e-2)


def test_captured_drafts_change_nothing(folder: Path, assembly: Assembly) -> None:
    drafter = save_drafter(folder / "drafter", assembly)
    learned = assemble(settings(folder, drafter="specblock", drafter_path=drafter, draft_blocks=2))
    asked = [request(str(n), prompt, sampled(n)) for n, prompt in enumerate(random_prompts(4, 40))]
    plain = generate(learned.engine(learned.drafter("none")), *asked)
    drafted = generate(learned.engine(), *asked)
    assert {key: one.tokens for key, one in drafted.items()} == {key: one.tokens for key, one in plain.items()}
    assert sum(_drafted(one) for one in drafted.values()) > 0


@pytest.mark.parametrize("drafter", ["none", "specblock"])
def test_a_step_waits_once(folder: Path, assembly: Assembly, drafter: str) -> None:
    """For what it has emitted."""
    weights = save_drafter(folder / "drafter that waits", assembly)
    drafts = {"drafter": "specblock", "drafter_path": weights, "draft_blocks": 2, "budget_policy": "fixed"}
    learned = assemble(settings(folder, **drafts))
    engine = learned.engine(learned.drafter(drafter))
    ask(engine, request("0", list(range(40)), greedy(100)))
    for _ in range(8):
        engine.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [Path(wait.filename).name for wait in waits] == ["emit.py"]


def test_the_pool_takes_a_share_of_what_is_left(folder: Path) -> None:
    free = torch.cuda.mem_get_info(DEVICE)[0]
    shared = assemble(settings(folder, kv_cache="5%"))
    pool_bytes = bytes_of(shared.target.pool)
    assert 0.02 * free < pool_bytes <= 0.05 * free


def test_too_large_a_pool_names_its_setting(folder: Path) -> None:
    with pytest.raises(StartupError, match="kv_cache"):
        assemble(settings(folder, kv_cache="100000GiB"))


def test_a_refusal_of_the_device_is_a_start_up_error() -> None:
    with pytest.raises(StartupError, match="lower it"), memory_for("everything", "lower it"):
        torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE)


def test_priorities() -> None:
    with serving(DEVICE):
        high = torch.cuda.current_stream(DEVICE).priority
        with low_priority_stream(DEVICE):
            assert torch.cuda.current_stream(DEVICE).priority > high


def test_what_is_asked_for_after_serving_waits_for_it() -> None:
    value = torch.zeros((), device=DEVICE)
    with serving(DEVICE):
        torch.cuda._sleep(_LONG)
        value.fill_(1)
    assert value.item() == 1


def test_learning_waits_for_what_was_asked_for_before() -> None:
    value = torch.zeros((), device=DEVICE)
    torch.cuda._sleep(_LONG)
    value.fill_(1)
    with low_priority_stream(DEVICE):
        assert value.item() == 1


@pytest.fixture(scope="module")
def learned(folder: Path, assembly: Assembly) -> Assembly:
    drafter = save_drafter(folder / "first drafter", assembly)
    return assemble(settings(folder, drafter="specblock", drafter_path=drafter, draft_blocks=2, budget_policy="fixed"))


def test_learning_beside_serving(learned: Assembly, tmp_path: Path) -> None:
    asked = requests(list(random_prompts(24, 30)), temperature=0.0, tokens=24)
    expected = texts(learned.engine(learned.drafter("none")), asked)
    with serving(DEVICE), learning(learned, tmp_path) as adaptive:
        found = texts(adaptive.engine, asked)
        assert settled(adaptive.worker)
        assert sum(adaptive.learner.training.num_updates.values()) > 0
        assert not adaptive.worker.failures
    assert found == expected


def test_a_publish_reaches_captured_forwards(folder: Path, assembly: Assembly, tmp_path: Path) -> None:
    drafter = save_drafter(
        folder / "drafter of one block", assembly
    )  # whether a second one pays is a matter of seconds
    learned = assemble(settings(folder, drafter="specblock", drafter_path=drafter, budget_policy="fixed"))
    asked = requests(list(random_prompts(2, 30)), temperature=0.0, tokens=24)
    with serving(DEVICE), learning(learned, tmp_path, policy="never") as adaptive:
        expected = texts(adaptive.engine, asked)
        before = _proposals(adaptive)
        same = _proposals(adaptive)
        adaptive.worker.ask(lambda: _publish_something_else(adaptive)).result()
        after = _proposals(adaptive)
        assert texts(adaptive.engine, asked) == expected
    assert (before > 0).any()
    # what was learnt of earlier drafts fades from step to step
    assert torch.allclose(before, same, atol=0.002)
    assert not torch.allclose(before, after, atol=0.02)


@torch.no_grad()
def _publish_something_else(adaptive: Adaptive) -> None:
    for value in adaptive.learner.weights.training.parameters():
        value.mul_(0.5).add_(0.1)
    adaptive.learner.weights.publish({})


def _proposals(adaptive: Adaptive) -> torch.Tensor:
    """What the drafter proposes behind a made-up text, with the weights that are served by now."""
    adaptive.learner.weights.between_steps()
    drafter = adaptive.engine.drafter
    width = len(drafter.tap_layers) * adaptive.network.config.hidden_size
    features = torch.randn(21, width, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    slots, row = torch.arange(1, 22, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    drafter.start([DraftContext(0, list(range(21)))])
    drafter.read(Read(row=0, start=0, tokens=slots[:20], slots=slots[:20], features=features[:20]))
    drafter.commit(
        Committed(
            rows=row,
            tokens=row[:, None] + 21,
            counts=row + 1,
            tree=DraftTree.empty(1).to(DEVICE),
            result=VerifyResult(*[row.new_zeros(1, 0)] * 3),
            features=features[None, 20:],
            positions=row + 20,
            slots=slots[None, 20:],
            logits=torch.zeros(1, adaptive.network.config.target_vocab_size, device=DEVICE),
            chosen_by=row[None],
        )
    )
    grown = drafter.grow(row, Noise(row, torch.zeros(1, device=DEVICE), row + 21))
    drafter.finish([0])
    return grown.survival.clone()


def _drafted(one: Generated) -> int:
    assert one.end.speculation is not None
    return sum(one.end.speculation.drafted_per_step)
