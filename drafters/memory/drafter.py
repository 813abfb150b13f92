"""One tree of what texts have said and what a network proposes, which is asked while that pays.
Legend: batch; rows = sequences of the engine's table."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import TypeVar

import torch
from torch import Tensor

from drafters import readback
from drafters.calibration import MIN_SURVIVAL
from drafters.gating import AskGate
from drafters.protocol import Committed, DraftContext, Drafter, DraftingSizes, Noise, RankOutcomes, Read, StepTimes
from drafters.readback import Observe
from drafters.tree import Candidates
from kernels import ops
from kernels.memory import NO_TOKEN, ORDERS, PREDICTION, TEXT, WAYS, Memory

_Told = TypeVar("_Told", Read, Committed)

_ANSWERED = 8192  # tokens of a text whose contexts all have a place; longer ones lose what is rarest
_RATE = 0.1  # AdaGrad's, of a weight that has not been learnt: 0.05 to 0.3 give the same trees
_PRIOR_SQUARES = 20.0  # what the prior's weights count for, in squared gradients: some hundred labels


class MemoryDrafter(Drafter):
    """Remembers texts, and asks a network beside them if it has one."""

    def __init__(self, sizes: DraftingSizes, network: Drafter | None = None) -> None:
        device, rows = torch.device(sizes.device), sizes.max_sequences + 1
        self._network = network
        self._max_nodes = sizes.max_nodes
        self._own = _power_of_two(min(sizes.max_length, _ANSWERED) * len(ORDERS) // WAYS)  # buckets of a text
        past = _power_of_two(sizes.memory_bytes // (sizes.memory_scopes * WAYS * 8)) if sizes.memory_bytes else 0
        self._memory = memory = Memory.empty(
            rows, past * sizes.memory_scopes + 2 * rows * self._own, sizes.memory_scopes, sizes.max_nodes, device
        )
        self._past, self._first_text = past, past * sizes.memory_scopes
        self._forget(range(sizes.memory_scopes))
        self._ops = ops.on(device)
        self._gate = None if network is None else AskGate(network.name, sizes.ledger)
        self._survivals, self._outcomes = (readback.readback_of(device) for _ in range(2))
        self._expected = 0.0  # tokens per sequence by the last trees without the network that were read back
        self._has_asked = False
        self._follows = True  # texts, for the network
        self._credits = {"memory": 0} if network is None else {"memory": 0, network.name: 0}
        assert not memory.weights.is_cuda, "there is no kernel for it yet"

    @property
    def name(self) -> str:
        """Of those who draft: a network that is yet to be made leaves the memory alone."""
        network = self._network
        return "memory" if network is None or not network.ready else f"memory+{network.name}"

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self._credits)

    @property
    def version(self) -> int:
        return 0 if self._network is None else self._network.version

    @property
    def tap_layers(self) -> tuple[int, ...]:
        return () if self._network is None else self._network.tap_layers

    @property
    def reads_prompts(self) -> bool:
        return self._network is not None and self._network.reads_prompts

    @property
    def wants_scores(self) -> bool:
        return self._network is not None and self._network.wants_scores

    @property
    def num_blocks(self) -> int:
        return 0 if self._network is None else self._network.num_blocks

    def credits(self) -> dict[str, int]:
        return self._credits

    def start(self, contexts: Sequence[DraftContext]) -> None:
        for context in contexts:
            self._start(context)
        if self._network is None:
            return
        assert self._gate is not None
        if contexts:  # of a text that it has not followed from its beginning the network knows too little
            warm = any(context.warm for context in contexts)
            self._follows = self._network.ready and self._gate.affords_text(warm=warm)
        self._network.start(contexts)

    def read(self, read: Read) -> None:
        assert self._network is not None
        self._network.read(_followed(read, follow=self._follows))

    def grow(self, rows: Tensor, noise: Noise) -> Candidates:
        if noise.warm:
            self._memory.seeds[rows], self._memory.roots[rows] = noise.seeds, noise.positions
        tree = self._ops.grow_joint_tree(self._memory, rows, None, self._max_nodes, MIN_SURVIVAL)
        if self._network is None or not self._network.ready:
            return tree
        assert self._gate is not None
        self._gate.begin(rows.shape[0], warm=noise.warm)
        self._survivals.read(tree.survival.sum()[None] / max(1, rows.shape[0]), self._observe_expected)
        self._has_asked = self._gate.ask(self._expected, can_answer=self._follows)
        if not self._has_asked:
            return tree
        proposed = self._network.grow(rows, noise)
        return self._ops.grow_joint_tree(self._memory, rows, proposed, self._max_nodes, MIN_SURVIVAL)

    def commit(self, committed: Committed) -> None:
        told = committed.rows, committed.tokens, committed.counts, committed.tree, committed.result.target_tokens
        observe = None if self._gate is None or not self._has_asked else self._gate.end()
        self._outcomes.read(self._ops.learn_committed(self._memory, *told, _RATE), partial(self._credit, observe))
        self._has_asked = False
        if self._network is None:
            return
        assert self._gate is not None
        self._follows = self._follows and self._gate.promises
        self._network.commit(_followed(committed, follow=self._follows))

    def finish(self, rows: Sequence[int]) -> list[int]:
        if self._network is not None:
            self._network.finish(rows)
        predicted: list[int] = self._memory.predicted[list(rows)].tolist()  # planned transfer
        return predicted

    def timed(self, times: StepTimes) -> None:
        if self._gate is not None and self._network is not None:
            self._gate.took(times, followed=self._follows)
            self._network.timed(times)

    def renew(self) -> None:
        if self._gate is not None and self._network is not None:
            self._gate.renew()
            self._follows = self._network.ready
            self._network.renew()

    def rank_outcomes(self) -> RankOutcomes:
        return RankOutcomes() if self._network is None else self._network.rank_outcomes()

    def _start(self, context: DraftContext) -> None:
        """Take in a text: its prompt, the prediction that may follow, and what it has answered so far."""
        memory, row, own = self._memory, context.row, self._own
        first = self._first_text + 2 * row * own
        num_predicted = own if context.prediction else 0
        memory.entries[first : first + own + num_predicted] = 0
        memory.parts[row] = torch.tensor([[first, own], [first + own, num_predicted], [0, self._past]])
        memory.tails[row] = NO_TOKEN
        memory.predicted[row] = 0
        memory.warm[row], memory.stores[row] = context.warm, context.store
        num_prompt = len(context.tokens) - context.num_generated
        texts = (
            (TEXT, context.tokens[:num_prompt]),
            (PREDICTION, context.prediction),
            (TEXT, context.tokens[num_prompt:]),
        )
        for part, tokens in texts:
            if tokens:
                self._ops.add_text(memory, row, part, torch.tensor(tokens, device=memory.entries.device))

    def _forget(self, scopes: Sequence[int]) -> None:
        """Begin again with nothing remembered in these scopes."""
        for scope in scopes:
            self._memory.entries[scope * self._past : (scope + 1) * self._past] = 0
            self._memory.weights[scope] = _prior()
            self._memory.squares[scope] = _PRIOR_SQUARES

    def _observe_expected(self, expected: Sequence[float]) -> None:
        (self._expected,) = expected

    def _credit(self, observe: Observe | None, outcome: Sequence[float]) -> None:
        """Credit a network that was asked with the accepted tokens that the memory alone would not have had."""
        alone, accepted, committed = map(int, outcome)
        extra = max(0, accepted - alone) if observe is not None else 0
        self._credits["memory"] += accepted - extra
        if observe is not None and self._network is not None:
            self._credits[self._network.name] += extra
            observe((extra, committed))


def _followed(what: _Told, *, follow: bool) -> _Told:
    """What a network is to take in; `follow`: whether it follows texts at present."""
    return what if follow else replace(what, follow=False)


def _power_of_two(most: int) -> int:
    """The largest one that is not above; at least 1."""
    return 1 << max(0, most.bit_length() - 1)


@cache
def _prior() -> Tensor:
    """Weights to begin with: fitted by maximum likelihood to labels of 240 training prompts at T = 0 and 0.7.
    # [KINDS, FEATURES]"""
    return torch.tensor(json.loads(files(__package__).joinpath("prior.json").read_text()))
