"""Recurrent states: random schedules of chunks, trees, replays and repeated steps `==` a plain loop of single rows;
results against transformers and between implementations."""

import random
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from kernels.cpu.library import use_threads
from kernels.ops import REFERENCE, Ops, implementation
from kernels.recurrence import Convolution, LayerStates, Recurrence, StateRows
from tests.kernels.conftest import BUILDS, of_build
from tests.kernels.random_walks import Tree

ROW_TYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
WORKING, STATES, NODES = 8, 400, 12  # working states, all states of a pool, most nodes of a tree


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Layer(NamedTuple):
    """A layer's forms, with random weights."""

    convolution: Convolution
    recurrence: Recurrence | None

    @property
    def input_columns(self) -> int:
        columns = self.convolution.weight.shape[0]
        if self.recurrence is None:
            return columns
        return columns + (1 + self.recurrence.corrects) * self.recurrence.heads

    def states(self, dtype: torch.dtype, device: str = "cpu", states: int = STATES) -> LayerStates:
        columns, kernel = self.convolution.weight.shape
        form, tail = self.recurrence, torch.zeros(states, kernel - 1, columns, device=device)
        matrix = form and torch.zeros(states, form.heads, form.key_dim, form.value_dim, device=device)
        drafted = torch.zeros(WORKING * NODES, self.input_columns, dtype=dtype, device=device)
        return LayerStates(tail, matrix, drafted)

    def to(self, device: str) -> "Layer":
        def moved(form: Any) -> Any:
            return form and type(form)(*(v.to(device) if isinstance(v, Tensor) else v for v in form))

        return Layer(*map(moved, self))


def layer(
    kind: str, key_heads: int = 2, heads: int = 4, key_dim: int = 10, value_dim: int = 20, kernel: int = 4
) -> Layer:
    if kind == "convolution":
        return Layer(Convolution(drawn(70, 3), None, activated=False), None)
    columns, skip, limits = 2 * key_heads * key_dim + heads * value_dim, None, (0.0, float("inf"))
    if kind == "mamba":
        skip, limits = drawn(heads, seed=5), (0.1, 2.0)
    gates = -drawn(heads, seed=3).exp(), drawn(heads, seed=4)
    form = Recurrence(key_heads, heads, key_dim, value_dim, *gates, kind == "delta", skip, limits)
    return Layer(Convolution(drawn(columns, kernel), drawn(columns, seed=2), activated=True), form)


LAYERS = {kind: layer(kind) for kind in ("delta", "mamba", "convolution")}
KINDS = pytest.mark.parametrize("kind", LAYERS)


class Part(NamedTuple):
    """Rows of one sequence in a step."""

    source: int
    target: int
    extend: Tensor  # [rows, input columns]
    nodes: Tensor  # [nodes, input columns]
    parents: list[int]
    replayed: list[int]
    kept: int = 0


def advance(ops: Ops, layer: Layer, states: LayerStates, parts: list[Part]) -> list[tuple[Tensor, Tensor]]:
    """Results of each part's extend rows and of its nodes. Rows have more columns than are read, and some sequences
    more rows of nodes than nodes."""
    device, rng = str(states.tail.device), random.Random(len(parts))
    width, depth = (
        max(map(len, lists)) for lists in zip(*((part.parents, part.replayed) for part in parts), strict=True)
    )
    counts = [len(part.extend) for part in parts], [rng.randint(len(part.parents), width) for part in parts]
    padded = [
        functional.pad(part.nodes, (0, 0, 0, n - len(part.nodes))) for part, n in zip(parts, counts[1], strict=True)
    ]
    columns = [
        [part.source for part in parts],
        [part.target for part in parts],
        [part.replayed + [0] * (depth - len(part.replayed)) for part in parts],
        [len(part.replayed) for part in parts],
        [part.kept for part in parts],
        [0, *accumulate(counts[0])],
        [*accumulate(counts[1], initial=sum(counts[0]))],
        [part.parents + [-1] * (width - len(part.parents)) for part in parts],
    ]
    rows = StateRows(*(torch.tensor(column, dtype=torch.int64, device=device) for column in columns))
    given = functional.pad(torch.cat([*(part.extend for part in parts), *padded]), (0, 8), value=float("nan"))
    y = ops.advance_states(given.to(device), *layer.to(device), states, rows).cpu()
    assert y.dtype == given.dtype
    pieces = y.split([*counts[0], *counts[1]])
    return [*zip(pieces[: len(parts)], pieces[len(parts) :], strict=True)]


@dataclass
class PlainLoop:
    """Applies one row at a time, and keeps every state."""

    ops: Ops
    layer: Layer
    states: LayerStates
    last: int = 0

    def __call__(self, before: int, given: Tensor) -> tuple[Tensor, int]:
        self.last += 1
        [(y, _)] = advance(
            self.ops,
            self.layer,
            self.states,
            [Part(before, self.last, given[None], given.new_empty(0, len(given)), [], [])],
        )
        return y[0], self.last


@dataclass
class Running:
    """A sequence: its two working states, the current one, inputs accepted after it, and its state in the plain
    loop."""

    working: tuple[int, int]
    source: int = 0
    replayed: list[int] = field(default_factory=list)
    plain: int = 0


class Schedule:
    """Random steps of some sequences, each compared with a plain loop."""

    def __init__(self, ops: Ops, form: Layer, dtype: torch.dtype, device: str, seed: int) -> None:
        self.rng, self.ops, self.layer, self.dtype, self.seed = random.Random(seed), ops, form, dtype, seed
        self.states, plain = self.layer.states(dtype, device), self.layer.states(dtype, device)
        self.plain = PlainLoop(ops, self.layer, plain._replace(drafted=plain.drafted[:0]))
        self.sequences = [Running((1 + 2 * i, 2 + 2 * i)) for i in range(self.rng.randint(1, WORKING // 2))]

    def step(self) -> None:
        running = [one for one in self.sequences if self.rng.random() < 0.8] or self.sequences
        held = {row // NODES for one in self.sequences for row in one.replayed}
        free = self.rng.sample([area for area in range(WORKING) if area not in held], len(running))
        parts = [self.part(one)._replace(kept=area * NODES) for one, area in zip(running, free, strict=True)]
        for _ in range(self.rng.randint(1, 2)):  # a step that is repeated
            results = advance(self.ops, self.layer, self.states, parts)
        for one, part, (extend, nodes) in zip(running, parts, results, strict=True):
            self.compare(one, part, extend, nodes)
        if self.rng.random() < 0.3:
            self.snapshot(self.rng.choice(running))
        assert not any(value[0].any() for value in self.states[:2] if value is not None)

    def part(self, one: Running) -> Part:
        target = one.working[one.source == one.working[0]]
        tree = Tree.draw(self.rng, self.rng.choice([0, 1, 5, NODES]))
        extend, nodes = (self.rows(number) for number in (self.rng.choice([1, 1, 2, 6]), len(tree.parents)))
        return Part(one.source, target, extend, nodes, tree.parents, one.replayed)

    def rows(self, number: int) -> Tensor:
        self.seed += 1000
        return drawn(number, self.layer.input_columns, seed=self.seed, dtype=self.dtype)

    def compare(self, one: Running, part: Part, extend: Tensor, nodes: Tensor) -> None:
        state = one.plain
        for given, found in zip(part.extend, extend, strict=True):
            y, state = self.plain(state, given)
            assert torch.equal(y, found)
        for value, plain in zip(self.states[:2], self.plain.states[:2], strict=True):
            assert value is plain is None or torch.equal(value[part.target], plain[state])  # type: ignore[index]
        walked, paths = [state], list[list[int]]([[]])
        for number, (parent, given, found) in enumerate(zip(part.parents, part.nodes, nodes, strict=False)):
            y, after = self.plain(walked[parent + 1], given)
            assert torch.equal(y, found)
            walked.append(after)
            paths.append([*paths[parent + 1], part.kept + number])
        accepted = self.rng.randrange(len(walked))
        one.source, one.replayed, one.plain = part.target, paths[accepted], walked[accepted]

    def snapshot(self, one: Running) -> None:
        """The next step of a sequence begins with a copy of its state, if all that is accepted is in it."""
        if one.source and not one.replayed:
            for value in self.states[:2]:
                if value is not None:
                    value[WORKING + 1] = value[one.source]
            one.source = WORKING + 1


@ROW_TYPES
@KINDS
def test_states_and_results_are_those_of_a_plain_loop(on_cpu: Ops, kind: str, dtype: torch.dtype) -> None:
    for threads in (1, 2):
        use_threads(threads)
        for seed in range(12 if on_cpu.advance_states is REFERENCE.advance_states else 30):
            schedule = Schedule(on_cpu, LAYERS[kind], dtype, "cpu", seed)
            for _ in range(5):
                schedule.step()


@pytest.mark.parametrize("sizes", [(1, 3, 96, 33, 1), (2, 2, 3, 5, 16), (1, 1, 256, 16, 7)])
@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_heads_and_convolutions_of_other_sizes(compiled: Ops, kind: str, sizes: tuple[int, ...]) -> None:
    schedule = Schedule(compiled, layer(kind, *sizes), torch.float32, "cpu", 0)
    for _ in range(5):
        schedule.step()
    assert (torch.tensor([1e-40]) / 2).item(), "denormal numbers are zeros in states alone"


@ROW_TYPES
@KINDS
def test_on_a_device_states_and_results_are_those_of_a_plain_loop(kind: str, dtype: torch.dtype, device: str) -> None:
    interpreted = device == "cpu"
    form = layer(kind, 1, 2) if interpreted else LAYERS[kind]
    for seed in range(1 if interpreted else 30):
        schedule = Schedule(implementation("triton"), form, dtype, device, seed)
        for _ in range(2 if interpreted else 5):
            schedule.step()


@ROW_TYPES
@KINDS
def test_equals_the_reference(everywhere: tuple[Ops, str], kind: str, dtype: torch.dtype) -> None:
    form, found = LAYERS[kind], list[list[Tensor]]()
    for ops, device in (everywhere, (REFERENCE, "cpu")):
        states = form.states(dtype, device)
        extend, nodes = (drawn(n, form.input_columns, seed=n, dtype=dtype) for n in (20, 5))
        part = Part(0, 1, extend, nodes, [-1, 0, 0, 2, -1], [])
        first = advance(ops, form, states, [part])
        second = advance(ops, form, states, [part._replace(source=1, target=2, replayed=[0, 2, 3])])
        found.append([*first[0], *second[0], *(value[:3].cpu() for value in states if value is not None)])
    for one, other in zip(*found, strict=True):
        bound = 2**-7 if one.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(one, other, atol=bound, rtol=bound)


def convolved(x: Tensor, form: Convolution) -> Tensor:
    """By transformers. # [rows, columns]"""
    weight, activation = form.weight, "silu" if form.activated else None
    y: Tensor = qwen.causal_conv1d_fn(x.mT[None], weight, form.bias, activation)[0].mT
    return y


def alone(ops: Ops, form: Layer, given: Tensor) -> tuple[Tensor, LayerStates]:
    states = form.states(torch.float32)
    [(y, _)] = advance(ops, form, states, [Part(0, 1, given, given[:0], [], [])])
    return y, states


def test_equals_the_delta_rule_of_transformers(on_cpu: Ops) -> None:
    form = LAYERS["delta"]
    assert form.recurrence is not None
    keys, heads, key_dim, value_dim, decay, bias, *_ = form.recurrence
    given = drawn(50, form.input_columns)
    mixed, a, b = given.split([len(form.convolution.weight), heads, heads], 1)
    q, k, v = convolved(mixed, form.convolution).split([keys * key_dim, keys * key_dim, heads * value_dim], 1)
    g, beta = decay * functional.softplus(a + bias), b.sigmoid()
    per_head = q.unflatten(1, (keys, -1)), k.unflatten(1, (keys, -1)), v.unflatten(1, (heads, -1)), g, beta
    expected, state = qwen.torch_recurrent_gated_delta_rule(
        *(value[None] for value in per_head), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    y, states = alone(on_cpu, form, given)
    assert states.matrix is not None
    torch.testing.assert_close(y, expected[0].flatten(1), atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(states.matrix[1], state[0], atol=2e-5, rtol=2e-5)
    assert torch.equal(states.tail[1], mixed[-3:])


def test_equals_mamba_2_of_transformers(on_cpu: Ops) -> None:
    form = LAYERS["mamba"]
    assert form.recurrence is not None
    keys, heads, key_dim, value_dim, decay, bias, _, skip, limits = form.recurrence
    given = drawn(50, form.input_columns)
    mixed, dt = given.split([len(form.convolution.weight), heads], 1)
    x, b, c = convolved(mixed, form.convolution).split([heads * value_dim, keys * key_dim, keys * key_dim], 1)
    expected, state = granite.mamba2_chunk_scan(
        x.view(1, 50, heads, -1), dt[None], decay, b.view(1, 50, keys, -1), c.view(1, 50, keys, -1), 16, skip,
        dt_bias=bias, dt_softplus=True, dt_limit=limits, return_final_states=True,
    )  # fmt: skip
    y, states = alone(on_cpu, form, given)
    assert states.matrix is not None
    torch.testing.assert_close(y, expected.flatten(2)[0], atol=5e-5, rtol=2e-5)
    torch.testing.assert_close(states.matrix[1], state[0].mT, atol=5e-5, rtol=2e-5)


def test_equals_the_short_convolution_of_transformers(on_cpu: Ops) -> None:
    form = LAYERS["convolution"]
    given = drawn(50, form.input_columns)
    torch.testing.assert_close(alone(on_cpu, form, given)[0], convolved(given, form.convolution))


@ROW_TYPES
@pytest.mark.parametrize("gate_first", [False, True])
def test_the_gated_norm_equals_transformers(anywhere: tuple[Ops, str], gate_first: bool, dtype: torch.dtype) -> None:
    ops, device = anywhere
    for groups, size in ((4, 24), (1, 96), (3, 7)):
        y, gate = (drawn(8, groups * size, seed=seed, dtype=dtype) for seed in (0, 1))
        weight = drawn(groups * size if gate_first else size, seed=2, dtype=dtype)
        if gate_first:
            module: Any = granite.GraniteMoeHybridRMSNormGated(groups * size, size, 1e-5)
        else:
            module = qwen.Qwen3NextRMSNormGated(size, 1e-5)
        module.weight.data = weight
        lines = (-1, groups * size) if gate_first else (-1, size)
        expected = module(y.reshape(lines), gate.reshape(lines)).view(8, -1)
        y, wider, weight = (value.to(device) for value in (y, torch.cat((gate, gate), 1), weight))
        norm = partial(ops.gated_rms_norm, weight=weight, epsilon=1e-5, gate_first=gate_first, groups=groups)
        found = norm(y, wider[:, : groups * size])  # columns of a product
        bound = 2**-7 if dtype == torch.bfloat16 else 2e-6
        torch.testing.assert_close(found.cpu(), expected, atol=bound, rtol=bound)
        alone = [norm(y[i : i + 1], wider[i : i + 1, : groups * size]) for i in range(len(y))]
        assert torch.equal(torch.cat(alone), found)


def test_a_long_convolution_is_refused(compiled: Ops) -> None:
    form = Layer(Convolution(drawn(8, 17), None, activated=True), None)
    with pytest.raises(NotImplementedError, match="17 inputs"):
        alone(compiled, form, drawn(3, 8))


@ROW_TYPES
def test_every_build_for_x86_gives_the_same_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[list[Tensor]]()
    for build in (name for name in BUILDS if not name.startswith("neon")):
        for ops in of_build(build, monkeypatch):
            results = list[Tensor]()
            for form in LAYERS.values():
                states, given = form.states(dtype), drawn(9, form.input_columns, dtype=dtype)
                results += advance(ops, form, states, [Part(0, 1, given[:5], given[5:], [-1, 0, 0, -1], [])])[0]
                results += (value[1] for value in states[:2] if value is not None)
            norm = partial(ops.gated_rms_norm, gate_first=True, groups=3)
            results.append(
                norm(drawn(4, 60, dtype=dtype), drawn(4, 60, seed=1, dtype=dtype), drawn(60, dtype=dtype), 1e-5)
            )
            found.append(results)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))
