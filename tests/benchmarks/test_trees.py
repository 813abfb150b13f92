"""The benchmark of trees against chains: its chains, its sign test, the command."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.trees import chain_of, chain_weights, compared, sign_test
from drafters.tree import DraftTree
from kernels.lattice import StartNodes
from service.assembly import assemble
from service.bench.driver import Answer, Run
from tests.service.bench.parts import assembled, save_drafter, save_two_layers


def tree(tokens: list[int], parents: list[int], depths: list[int], survival: list[float], count: int) -> DraftTree:
    ids, below, levels, likely = (torch.tensor([value]) for value in (tokens, parents, depths, survival))
    return DraftTree(ids, below, levels, likely, num_nodes=torch.tensor([count]))


def test_a_chain_is_the_path_with_the_largest_sum_of_survival() -> None:
    given = tree([5, 6, 7, 8, 9, 4], [-1, -1, 0, 0, 2, 1], [1, 1, 2, 2, 3, 2], [0.5, 0.6, 0.4, 0.3, 0.2, 0.9], 5)
    found = chain_of(given, 4)
    assert found.num_nodes.tolist() == [3]
    assert found.tokens[0, :3].tolist() == [5, 7, 9]
    assert found.parents[0, :3].tolist() == [-1, 0, 1]
    assert found.depths[0, :3].tolist() == [1, 2, 3]
    assert found.survival[0, :3].tolist() == pytest.approx([0.5, 0.4, 0.2])
    assert chain_of(given, 2).tokens[0, :2].tolist() == [5, 7]
    assert chain_of(given, 1).tokens[0, :1].tolist() == [6]
    assert chain_of(DraftTree.empty(1), 4).width == 0


def run_of(*accepted: int, seconds: float = 1.0) -> Run:
    return Run((Answer((1,) * (len(accepted) + sum(accepted)), accepted_per_step=accepted),), (), seconds)


def test_the_sign_test_counts_prompts() -> None:
    more, fewer = [run_of(2, 2)] * 9, [run_of(1, 2)] * 9
    assert sign_test(more, fewer) == (9, 0, 2 / 2**9)
    assert sign_test(more[:1], more[:1]) == (0, 0, 1.0)
    assert sign_test([*more[:1], *fewer[:1]], [*fewer[:1], *more[:1]]) == (1, 1, 1.0)


def test_trees_are_compared_with_the_fastest_chain_that_is_no_larger() -> None:
    runs = {
        "plain": [run_of(0, seconds=1.0)],
        **{"tree 2": [run_of(1)], "tree 4": [run_of(3)], "again 4": [run_of(3)]},
        **{"chain 2": [run_of(1, seconds=0.5)], "chain 4": [run_of(1)]},
    }
    row = compared(runs, 4, [2, 4])
    assert (row["tokens"][0], row["fastest_chain"], row["seconds"][0], row["noise"][0]) == (2.0, 2, 1.0, 1.0)
    assert compared(runs, 2, [2, 4])["seconds"][0] == 0.5


def test_a_block_continues_a_chain_at_its_end(tmp_path: Path) -> None:
    assembly = assembled(save_two_layers(tmp_path / "model"))
    changes = {"drafter": "specblock", "drafter_path": save_drafter(tmp_path / "drafter", assembly)}
    weights = assemble(assembly.config.model_copy(update=changes)).weights
    assert weights is not None
    assert chain_weights(weights, 9).blocks == -(-9 // weights.network.config.block_size)
    grow = chain_weights(weights, 4).network.ops.grow_lattice
    tokens, predicted = torch.arange(6).view(1, 1, 2, 3), torch.tensor([0.5, 0.4, 0.1]).expand(1, 1, 2, 3)
    trust = torch.ones(2, 3)
    first, picked = grow(StartNodes.root(1, torch.device("cpu")), tokens, predicted, trust, 0, 0.01, 1)
    assert first.survival.tolist() == [[0.5, 0, 0, 0.25, 0, 0]]
    assert [value.item() for value in (*picked.origin, *picked[1:])] == [3, 2, 0.25, 3, 0, 1]
    second, _ = grow(picked.origin, tokens + 6, predicted, trust, 6, 0.01, 1)
    assert second.parents[0, [0, 3]].tolist() == [3, 6]
    assert second.survival[0, [0, 3]].tolist() == [0.125, 0.0625]


def test_the_command(run: Callable[..., tuple[int, str]], tmp_path: Path, prompt_file: Path) -> None:
    folder = save_two_layers(tmp_path / "model")
    drafter, out = save_drafter(tmp_path / "drafter", assembled(folder)), tmp_path / "trees.json"
    code, output = run(
        "trees --limit 2 --max-tokens 8 --nodes 2,4 --device cpu --load-dtype float32 --threads 1",
        *("--kv-cache", "10MiB", "--max-model-len", 256, "--model", folder, "--state-dir", tmp_path),
        *("--kinds", f"memory,specblock={drafter}", "--prompts", prompt_file, "--out", out),
    )
    assert code == 0, output
    report = json.loads(out.read_text())
    assert [(row["temperature"], row["nodes"]) for row in report["rows"]] == 2 * [(0, 2), (0, 4), (1, 2), (1, 4)]
    assert report["summary"] == {"mismatched_tokens": 0, "prompts": 2}
    assert all(row["tree_tokens"] >= 1 for row in report["rows"])
