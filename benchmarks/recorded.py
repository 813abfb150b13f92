"""`python -m benchmarks recorded`: the memory without a network against SuffixDecoding (arXiv 2411.04975, by its own
package), on recorded answers and without a model.

Each step proposes a tree; its longest path in the recorded answer is accepted, and the next token added. Both drafters
have seen all earlier answers. Each answers with several settings; at a given mean of nodes per step the best mixture of
two settings counts, where each request gets one of them at random.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.shared import paired_bootstrap, shown
from drafters.memory.drafter import MemoryDrafter
from drafters.protocol import Committed, DraftContext, DraftingSizes, MemorySizes
from drafters.tree import MAX_DEPTH, ROOT, DraftTree, VerifyResult
from service.bench.commands import Out, numbers
from service.bench.experiment import Column, Row, counted, report, table_of
from service.conditions import refuse_unwritable, surroundings
from service.config import LoadedConfig
from service.errors import StartupError
from service.training.regenerate import Response, read_responses

OURS, THEIRS = "memory", "SuffixDecoding"

Nodes = Sequence[tuple[int, int]]
"""Token and parent of each node, ROOT for the root; parents come before children."""

_MOST = 64  # nodes of a tree
_SURVIVAL = (0.15, 0.08, 0.04, 0.02, 0.01, 0.004)
"""Settings of ours: nodes with less survival are left out."""
_THEIRS = (*product((0.3, 0.1, 0.03), (1, 2, 4, 8, 16), (0,)), (0.1, 2, -1), (0.1, 4, -1))
"""Settings of theirs, by default (0.1, 1, 0): least probability of a node, nodes per matched token, extra nodes."""
_TREE_DEPTH = 64  # their default


class Ours:
    """The memory, with all nodes of at least so much survival."""

    def __init__(self, least: float, num_bytes: int) -> None:
        memory = MemorySizes(num_bytes=num_bytes)
        sizes = DraftingSizes(max_sequences=1, max_length=8192, max_nodes=_MOST, memory=memory)
        self._drafter, self._rows, self._least = MemoryDrafter(sizes), torch.tensor([0]), least

    def start(self, number: int, text: Response) -> None:
        """Begin an answer."""
        self._drafter.start([DraftContext(0, text.prompt, warm=text.temperature > 0)])

    def propose(self) -> Nodes:
        """Return a tree."""
        tree = self._drafter.recall(self._rows)
        count = int((tree.survival[0] >= self._least).sum())  # sorted, descending
        return list(zip(tree.tokens[0, :count].tolist(), tree.parents[0, :count].tolist(), strict=True))

    def take(self, tokens: Sequence[int]) -> None:
        """Append tokens of the answer."""
        none, given = torch.zeros(0), (self._rows, torch.tensor([tokens]), torch.tensor([len(tokens)]))
        verdict = DraftTree.empty(1), VerifyResult(none, none, none)  # of which the memory reads nothing
        self._drafter.commit(Committed(*given, *verdict, None, none, none))


class Theirs:
    """SuffixDecoding's cache. Raises StartupError without its package."""

    def __init__(self, least: float, factor: float, offset: float) -> None:
        try:
            from arctic_inference.suffix_decoding import SuffixDecodingCache
        except ImportError as error:
            raise StartupError("SuffixDecoding needs a package: pip install arctic-inference") from error
        self._cache, self._number, self._text = SuffixDecodingCache(_TREE_DEPTH), -1, np.zeros(0, np.int32)
        limits = {"max_spec_factor": factor, "max_spec_offset": offset, "min_token_prob": least}
        self._how = {"max_spec_tokens": _MOST, "use_tree_spec": True, **limits}

    def start(self, number: int, text: Response) -> None:
        """As `Ours`."""
        if self._number >= 0:
            self._cache.stop_request(self._number)
        self._number, self._text = number, np.array(text.prompt, np.int32)
        self._cache.start_request(number, self._text)

    def propose(self) -> Nodes:
        """As `Ours`."""
        draft = self._cache.speculate(self._number, self._text, **self._how)
        return list(zip(draft.token_ids, draft.parents, strict=True))

    def take(self, tokens: Sequence[int]) -> None:
        """As `Ours`."""
        self._text = np.append(self._text, np.array(tokens, np.int32))
        self._cache.add_active_response(self._number, tokens)


def accepted(nodes: Nodes, follows: Sequence[int]) -> int:
    """Return how many of the following tokens are a path from the root."""
    children, parent = {(parent, token): number for number, (token, parent) in enumerate(nodes)}, ROOT
    for depth, token in enumerate(follows):
        if (parent, token) not in children:
            return depth
        parent = children[parent, token]
    return len(follows)


def played(player: Ours | Theirs, texts: Iterable[Response]) -> np.ndarray:
    """Replay the answers; return tokens, steps and nodes of each. -> [3, texts]"""
    counts = []
    for number, text in enumerate(texts):
        player.start(number, text)
        done = steps = proposed = 0
        while done < len(text.response):
            nodes = player.propose()
            taken = 1 + accepted(nodes, text.response[done : done + MAX_DEPTH][:-1])
            player.take(text.response[done : done + taken])
            done, steps, proposed = done + taken, steps + 1, proposed + len(nodes)
        counts.append((done, steps, proposed))
    return np.array(counts, float).T


def matched(settings: Sequence[np.ndarray], mean: float) -> np.ndarray:
    """Return the expected counts of the mixture of two settings with this mean of nodes per step that needs the fewest
    steps; where no setting has so many nodes, of the one with the most. settings: each [3, texts] -> [3, texts]"""
    over = [counts[2].sum() - mean * counts[1].sum() for counts in settings]
    found = [max(settings, key=lambda counts: counts[2].sum() / counts[1].sum())] if max(over) <= 0 else []
    for few, many in product(range(len(settings)), repeat=2):
        if over[few] <= 0 < over[many]:
            share = over[many] / (over[many] - over[few])
            found.append(share * settings[few] + (1 - share) * settings[many])
    if not found:
        raise StartupError(f"--nodes {mean:g}: every setting has more nodes; give a larger number")
    return min(found, key=lambda counts: float(counts[1].sum()))


def row_of(stream: str, mean: float, mine: np.ndarray, others: np.ndarray) -> Row:
    """Return tokens per step of both drafters, and ratios with intervals: of all tokens, and of accepted ones.
    mine, others: [3, texts] of the same texts"""
    columns = np.concatenate([mine, others])
    means = [counts.sum(1) / counts[1].sum() for counts in (mine, others)]
    return {
        "kind": stream,
        "requests": mine.shape[1],
        "tokens": int(mine[0].sum()),
        "mean_nodes": mean,
        "nodes": [float(of_step[2]) for of_step in means],
        "tokens_per_step": [float(of_step[0]) for of_step in means],
        "ratio": paired_bootstrap(lambda sums: sums[4] / sums[1], columns),
        "accepted_ratio": paired_bootstrap(lambda sums: (sums[0] / sums[1] - 1) / (sums[3] / sums[4] - 1), columns),
    }


def run(
    loaded: LoadedConfig,
    responses: Annotated[list[Path], typer.Option(metavar="FILE", help="JSONL of `adaptree train regenerate`.")],
    nodes: Annotated[str, typer.Option(metavar="N,...", help="Mean nodes per step of both.")] = "4,8,16",
    limit: Annotated[int | None, typer.Option(min=2, help="At most so many requests of each kind.")] = None,
    out: Out = None,
) -> bool:
    """Compare tokens per step of the memory with SuffixDecoding, by kind of recorded answers."""
    refuse_unwritable(out)
    torch.set_num_threads(1)
    streams, means, rows = defaultdict[str, list[Response]](list), numbers(nodes, "--nodes"), list[Row]()
    for text in read_responses(responses):
        if limit is None or len(streams[text.task]) < limit:
            streams[text.task].append(text)
    players: dict[str, list[Callable[[], Ours | Theirs]]] = {
        OURS: [partial(Ours, least, loaded.config.memory_bytes) for least in _SURVIVAL],
        THEIRS: [partial(Theirs, *setting) for setting in _THEIRS],
    }
    with counted(sum(map(len, players.values())) * len(streams), "settings") as advance:
        for stream, texts in streams.items():
            counts: dict[str, list[np.ndarray]] = {name: [] for name in players}
            for name, make in ((name, make) for name, made in players.items() for make in made):
                counts[name].append(played(make(), texts))
                advance(1)
            rows += [row_of(stream, mean, *(matched(found, mean) for found in counts.values())) for mean in means]
    summary = {
        f"{key}, {mean} nodes": geometric_mean(row[key][0] for row in rows if row["mean_nodes"] == mean)
        for key, mean in product(("ratio", "accepted_ratio"), means)
    }
    conditions = {**surroundings(), "arctic_inference": version("arctic_inference")}
    table = table_of(_COLUMNS, rows, section=lambda row: row["kind"])
    return report(conditions, out, rows, summary, table, *(f"{key}: {value:.3f}" for key, value in summary.items()))


_COLUMNS: tuple[Column, ...] = (
    ("kind", lambda row: row["kind"]),
    ("nodes", lambda row: "{:.1f}, {:.1f}".format(*row["nodes"])),
    ("tokens per step", lambda row: "{:.3f}, {:.3f}".format(*row["tokens_per_step"])),
    ("ratio", lambda row: shown(row["ratio"])),
    ("of accepted alone", lambda row: shown(row["accepted_ratio"])),
)
