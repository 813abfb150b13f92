"""A model that several processes share computes the bits of one: on several families, in both types, by uneven heads,
with trees, windows, several sequences and other pools. The processes are threads here, and their connections pipes."""

import json
import threading
from collections.abc import Callable, Iterator
from itertools import combinations
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import GridExecutor

from benchmarks.gguf_shapes import Mix, Shape, write_shape
from drafters.tree import DraftTree
from kernels import ops
from kernels.cpu import library
from kernels.ops import implementation
from kernels.pieces import TensorShard
from kernels.rows import ExtendRows
from kernels.tree_attention import AttentionRows
from service.bench.servers import came_true
from service.drafter import make_drafter
from service.engine import thread
from service.engine.budget import FixedBudget
from service.engine.engine import Engine
from service.engine.kv_pool import KVPool
from service.engine.measuring import Trial
from service.engine.peers import Peers, SharedForward
from service.engine.shards import ModelShard
from service.engine.target import Target
from service.engine.weights import (
    EMBEDDED_NAME,
    Described,
    LoadedModel,
    describe,
    gguf_file,
    kv_shape,
    load_model,
    load_weights,
)
from service.errors import PeerLost, StartupError
from service.follow import compute
from tests.kernels.conftest import prepared
from tests.service.engine.harness import LIMITS, vocabulary_of
from tests.tiny_models import WINDOW, loaded_tiny, tiny_model

pytestmark = pytest.mark.skipif(library.variant() is None, reason="no kernels are compiled")
CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 32, "intermediate_size": 288}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 9, "num_key_value_heads": 3},  # queries of one key on two devices
    "mistral": {"num_attention_heads": 8, "num_key_value_heads": 1},  # one key head on all
    "gemma": {},
    "gemma2": {},
    "gemma3": {},
    "phi3": {"num_key_value_heads": 2},  # fused projections
}
EXPERTS: dict[str, Any] = {"num_local_experts": 9, "num_experts": 9, "n_routed_experts": 9, "num_experts_per_tok": 3}
EXPERTS |= {"moe_intermediate_size": 128, "num_key_value_heads": 2}
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "glm4_moe": {"n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},  # beside a shared one
    "gpt_oss": {},
    "gemma4_text": {
        "enable_moe_block": True,
        "top_k_experts": 3,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },  # beside a dense feed-forward
}
SLOTS = 300
Found = TypeVar("Found")


def connected(size: int) -> list[dict[int, Any]]:
    """The connections of each of so many processes."""
    ends: list[dict[int, Any]] = [{} for _ in range(size)]
    for one, other in combinations(range(size), 2):
        ends[one][other], ends[other][one] = Pipe()
    return ends


def part_of(described: Described, shard: TensorShard) -> ModelShard | None:
    return None if shard.size == 1 else ModelShard.of(described.config, shard)


def shared(
    folder: str, size: int, ask: Callable[[Target], Found], dtype: torch.dtype = torch.float32, **sizes: Any
) -> tuple[Found, LoadedModel]:
    """What a target of so many processes answers, and what its leader has loaded. `sizes`: of the KV pool."""
    ends, described = connected(size), describe(folder, revision=None, unverified=False)
    parts = [part_of(described, TensorShard(rank, size)) for rank in range(1, size)]
    models = [load_weights(described, dtype, CPU, in_blocks=True, part=part) for part in parts]
    whole = part_of(described, TensorShard(0, size))
    leader = load_model(described, dtype=dtype, device=CPU, in_blocks=True, part=whole)
    failures: list[BaseException] = []

    def follow(rank: int) -> None:
        part, model = parts[rank - 1], models[rank - 1]
        try:
            with torch.inference_mode():
                pool = KVPool(kv_shape(model, part), 2, CPU)
                compute(Target(model, pool, part, Peers(TensorShard(rank, size), ends[rank])))
        except PeerLost:
            return  # the leader says why
        except BaseException as error:
            failures.append(error)
            for other in ends[rank].values():
                other.close()

    threads = [threading.Thread(target=follow, args=(rank,), daemon=True) for rank in range(1, size)]
    for one in threads:
        one.start()
    peers = Peers(TensorShard(0, size), ends[0])
    try:
        target = Target(leader.model, KVPool(leader.kv_shape, SLOTS, CPU), leader.part, peers)
        target.pool = KVPool(leader.kv_shape, **{"num_slots": SLOTS, **sizes}, device=CPU)
        return ask(target), leader
    finally:
        peers.close()
        for one in threads:
            one.join(60)
        if failures:
            raise failures[0]


def texts(target: Target) -> Tensor:
    """Logits of two sequences: prompts in chunks, a tree, then tokens one by one. # -> [rows, vocab]"""
    trial, lengths = Trial(target, sequences=2, max_length=WINDOW + 40), (WINDOW + 9, 5)
    for row, length in enumerate(lengths):
        trial.prefill(row, trial.random_tokens(length), chunk=7)
    roots = [ExtendRows(row, length, trial.random_tokens(1), completes=True) for row, length in enumerate(lengths)]
    tree = DraftTree.of(torch.tensor([[7, 8, 9], [4, 5, 6]]), torch.tensor([[-1, 0, 0], [-1, -1, 1]]))
    found = [trial.verify(roots, tree).flatten(0, 1)]
    for step in range(3):
        found += [trial.decode(row, 11 + step, length + step)[None] for row, length in enumerate(lengths)]
    return torch.cat(found)


def few_rows(target: Target) -> Tensor:
    """Logits of a tree after a short prompt. # -> [rows, vocab]"""
    trial = Trial(target, sequences=1, max_length=40)
    trial.prefill(0, trial.random_tokens(5), chunk=7)
    tree = DraftTree.of(torch.tensor([[7, 8, 9]]), torch.tensor([[-1, 0, 0]]))
    return trial.verify([ExtendRows(0, 5, trial.random_tokens(1), completes=True)], tree).flatten(0, 1)


def assert_shared(folder: str, dtype: torch.dtype = torch.float32, *, sizes: tuple[int, ...], **pool: Any) -> None:
    expected, whole = shared(folder, 1, texts, dtype, **pool)
    for size in sizes:
        found, leader = shared(folder, size, texts, dtype, **pool)
        assert torch.equal(found, expected)
        assert leader.fingerprint == whole.fingerprint
        assert leader.read_bytes < whole.read_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_computes_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    assert_shared(str(tiny_model(family, tmp_path, **{**WIDE, **FAMILIES[family]})), sizes=(4,))


def test_followers_compute_on_aligned_tensors_and_tables_of_few_widths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of a device are compiled for these."""
    heard, widths = Peers.heard, set[int]()

    def checked(peers: Peers, device: torch.device) -> Iterator[SharedForward]:
        for forward in heard(peers, device):
            given = [getattr(forward.attention, name) for name in AttentionRows.__slots__]
            assert all(value.data_ptr() % 16 == 0 for value in (*given, forward.slots, forward.table))
            widths.add(forward.table.shape[1])
            yield forward

    monkeypatch.setattr(Peers, "heard", checked)
    shared(str(tiny_model("llama", tmp_path, **WIDE)), 2, texts)
    assert widths == {512}


@pytest.mark.parametrize("family", OF_EXPERTS)
def test_experts_are_of_one_device_each(family: str, tmp_path: Path) -> None:
    folder = tiny_model(family, tmp_path, **{**WIDE, **EXPERTS, **OF_EXPERTS[family]})
    assert_shared(str(folder), sizes=(4,))


@pytest.mark.parametrize("family", ["llama", "gemma2", "glm4_moe"])
def test_so_it_does_in_bfloat16(family: str, tmp_path: Path) -> None:
    sizes = {**WIDE, **EXPERTS, **OF_EXPERTS[family]} if family in OF_EXPERTS else WIDE
    folder = tiny_model(family, tmp_path, dtype=torch.bfloat16, **sizes)
    assert_shared(str(folder), torch.bfloat16, sizes=(4,))


def test_a_file_in_another_type_has_the_fingerprint_of_one_process(tmp_path: Path) -> None:
    assert_shared(str(tiny_model("gemma", tmp_path, **WIDE)), torch.bfloat16, sizes=(2,))


def test_layers_with_a_window_keep_fewer_places(tmp_path: Path) -> None:
    assert_shared(str(tiny_model("gemma3", tmp_path, **WIDE)), sizes=(2,), num_places=150)


def test_files_keep_their_blocks(tmp_path: Path) -> None:
    shape = Shape(hidden=256, layers=2, heads=8, kv_heads=2, dim=128, feed_forward=1280, vocab=49152)
    embedded = gguf_file(EMBEDDED_NAME)
    assert embedded is not None
    write_shape(tmp_path / "a.gguf", shape, "q4_k_m", embedded)
    assert_shared(str(tmp_path / "a.gguf"), sizes=(2,))


@pytest.mark.parametrize(("arch", "mix"), [("qwen3moe", "q4_k_m"), ("gpt-oss", "mxfp4")])
def test_files_of_experts_keep_their_blocks(arch: str, mix: Mix, tmp_path: Path) -> None:
    embedded = gguf_file(EMBEDDED_NAME)
    assert embedded is not None
    sizes: dict[str, Any] = {"hidden": 256, "layers": 2, "heads": 8, "kv_heads": 2, "dim": 128, "feed_forward": 256}
    shape = Shape(**sizes, vocab=49152, tied=False, arch=arch, experts=9, chosen=3)
    write_shape(tmp_path / "a.gguf", shape, mix, embedded)
    assert_shared(str(tmp_path / "a.gguf"), sizes=(4,))


def test_the_embedded_model_has_nine_heads_for_four_processes() -> None:
    assert_shared(EMBEDDED_NAME, sizes=(4,))


@pytest.mark.slow("the device's kernels interpreted", covers="kernels/triton service/engine/peers.py")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_kernels_of_a_device_share_a_model(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices have the bits of four."""
    folder = str(tiny_model(family, tmp_path, **{**WIDE, **EXPERTS, "num_hidden_layers": 2}))
    expected, _ = shared(folder, 1, few_rows)
    prepared("cpu", monkeypatch)
    interpreted, one_at_a_time, launch = implementation("triton"), threading.Lock(), GridExecutor.__call__

    def locked(*given: Any, **named: Any) -> None:
        with one_at_a_time:
            launch(*given, **named)

    monkeypatch.setattr(GridExecutor, "__call__", locked)
    monkeypatch.setattr(ops, "_table", lambda device_type: interpreted)
    two, four = (shared(folder, size, few_rows)[0] for size in (2, 4))
    assert torch.equal(two, four)
    torch.testing.assert_close(two, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("family", "changes", "size", "message"),
    [
        ("llama", WIDE, 3, "tensor_parallel is 3"),
        ("llama", {}, 2, "too few heads, columns or experts for 2 devices"),
        ("olmo2", WIDE, 2, "norms over all heads"),
        ("mixtral", {**WIDE, "num_local_experts": 3, "num_key_value_heads": 4}, 4, "too few heads, columns or experts"),
        ("starcoder2", WIDE, 2, "own modules"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_fix(
    family: str, changes: dict[str, Any], size: int, message: str, tmp_path: Path
) -> None:
    folder = str(tiny_model(family, tmp_path, **changes))
    with pytest.raises(StartupError, match=message):
        shared(folder, size, texts)


def test_a_file_with_both_a_tied_embedding_and_a_head_is_refused(tmp_path: Path) -> None:
    folder = tiny_model("llama", tmp_path, **WIDE)
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "tie_word_embeddings": True}))
    with pytest.raises(StartupError, match="set tie_word_embeddings to false"):
        shared(str(folder), 2, texts)


def test_a_process_that_has_ended_is_told_at_once(tmp_path: Path) -> None:
    def lose(target: Target) -> None:
        for other in target.peers._others.values():
            other.close()
        with pytest.raises(PeerLost, match="does not answer"):
            texts(target)

    shared(str(tiny_model("llama", tmp_path, **WIDE)), 2, lose)


def test_an_error_amid_a_forward_ends_all(tmp_path: Path) -> None:
    """The others wait for sums of a forward that is not computed: to repeat it would mix up two."""

    def fail(*given: object) -> None:
        raise RuntimeError("no memory")

    def ask(target: Target) -> None:
        texts(target)
        target._layers = fail  # type: ignore[assignment]
        with pytest.raises(PeerLost, match="no memory"):
            texts(target)

    shared(str(tiny_model("llama", tmp_path, **WIDE)), 2, ask)


def test_an_idle_engine_looks_whether_all_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thread, "_IDLE_SECONDS", 0.05)
    folder = str(tiny_model("llama", tmp_path, **WIDE))

    def wait(target: Target) -> int:
        beats, ended = [], threading.Event()
        true = target.peers.beat

        def beat() -> None:
            true()
            beats.append(1)
            if len(beats) == 3:
                ended.set()

        monkeypatch.setattr(target.peers, "beat", beat)
        drafter = make_drafter("none", target, LIMITS)
        loaded = loaded_tiny("llama")
        engine = thread.EngineThread(Engine(target, LIMITS, vocabulary_of(loaded), drafter, FixedBudget(0)))
        engine.start(lambda outputs: None)
        assert ended.wait(10)
        for other in target.peers._others.values():
            other.close()
        assert came_true(lambda: engine.failure is not None)
        assert isinstance(engine.failure, PeerLost)
        return len(beats)

    assert shared(folder, 2, wait)[0] >= 3
