"""Compiles every kernel for a GPU that need not be there: launches are caught and compiled for the types they carry.

Run as a program without the interpreter: `python -m tests.kernels.compile_kernels 90`. Prints a line per kernel and
types: registers, bytes of stack (spills), bytes of shared memory.
"""

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kernels import layers
from kernels.layers import GateForm, RotaryRows
from kernels.memory import Memory
from kernels.ops import implementation
from kernels.pieces import Pieces
from kernels.sample import Filters
from kernels.tree_attention import MAX_NODES
from kernels.trees import DraftTree
from kernels.triton.settle import accept, commit_slots
from kernels.triton.trees import correct_survival
from tests.kernels import test_recurrence as recurrent
from tests.kernels.attention_parts import Heads, Part, Vectors, attend

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.bool: "*i1",
}
DEVICE = implementation("triton")
_OPTIONS = ("enable_fp_fusion", "num_warps", "num_stages")
_RESERVED = ("grid", "warmup", *_OPTIONS)


def catch_launches(architecture: int) -> dict[str, str]:
    """From now on launching a kernel compiles it; returns the listing that fills up."""
    compiled: dict[str, str] = {}

    def run(kernel: JITFunction, *args: object, **options: object) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | {
            name: value for name, value in options.items() if name not in _RESERVED
        }
        constants = {name: named[name] for name in (kernel.arg_names[i] for i in kernel.constexprs)}
        constants |= {name: None for name, value in named.items() if value is None}
        signature = {name: "constexpr" if name in constants else _type_of(value) for name, value in named.items()}
        kinds = (kind for kind in _leaves(tuple(signature.values())) if kind != "constexpr")
        key = f"{kernel.__name__}({', '.join(map(str, kinds))}) {constants}"
        if key not in compiled:
            source = ASTSource(kernel, signature, constants, _aligned(kernel, signature, named))
            wanted = {name: options[name] for name in _OPTIONS if name in options}
            done = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=wanted)
            compiled[key] = f"{_resources(done.asm['cubin'])} SHARED:{done.metadata.shared}"

    JITFunction.run = run
    return compiled


def _aligned(
    kernel: JITFunction, signature: dict[str, str], named: dict[str, object]
) -> dict[tuple[int, ...], list[list[object]]]:
    """What a launch specialises on: pointers and numbers that are multiples of 16."""
    return {
        path: [["tt.divisibility", 16]]
        for place, name in enumerate(kernel.arg_names)
        for path, value in _places(named[name], (place,))
        if isinstance(value, Tensor)
        or (signature[name] == "i32" and name not in kernel.do_not_specialize and int(str(value)) % 16 == 0)
    }


def _places(value: object, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], object]]:
    """An argument, or what is in one that is a tuple, by where it stands."""
    if isinstance(value, tuple):
        for place, part in enumerate(value):
            yield from _places(part, (*path, place))
    else:
        yield path, value


def _leaves(values: object) -> list[object]:
    return [leaf for _, leaf in _places(values, ())]


def _type_of(value: object) -> Any:
    """Of a tuple a tuple of the same kind."""
    if isinstance(value, tuple):
        types = map(_type_of, value)
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _resources(program: bytes) -> str:
    """Registers of a thread, and bytes it spills to its stack."""
    reader = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(program)
        spoken = subprocess.run(
            [reader, "--dump-resource-usage", file], capture_output=True, text=True, check=True
        ).stdout
    return " ".join(re.findall(r"REG:\d+|STACK:\d+", spoken))


def launch_everything(dtype: torch.dtype) -> None:
    """Every kernel on small inputs of the shapes' own kind; results are whatever memory holds."""
    for heads, sinks in ((Heads(2, 4, 128), None), (Heads(2, 4, 256), None), (Heads(1, 8, 512), torch.zeros(8))):
        text, nodes = Vectors.draw(40, heads, 1), Vectors.draw(2, heads, 2)
        part = Part(text, 39, 40, nodes, [-1, 0])
        attend([part], heads, DEVICE.plan_attention, dtype=dtype, query_dtype=dtype, sinks=sinks)
    _launch_layer(dtype)
    _launch_states(dtype)
    logits, zeros = torch.randn(2, 3000).to(dtype), torch.zeros(2, dtype=torch.int64)
    for filters in (None, Filters(zeros.float(), zeros, zeros.double())):
        DEVICE.sample(logits, zeros, zeros, zeros.float(), filters)
    DEVICE.rank_features(logits)
    tree = torch.zeros(2, MAX_NODES, dtype=torch.int64)
    accepted = accept(tree, tree - 1, zeros, torch.zeros(2, MAX_NODES + 1, dtype=torch.int64))
    commit_slots(accepted.path, zeros, zeros, tree, zeros, zeros, tree)
    DEVICE.fates(tree, tree - 1, tree, tree[:, :65], zeros)
    DEVICE.ancestor_matrix(tree - 1)
    correct_survival(DraftTree(tree, tree - 1, tree, tree.float(), zeros), zeros, torch.ones(64))
    _launch_memory(tree)


def _launch_memory(tree: Tensor) -> None:
    """With trees of the most nodes, and of few. # tree [2, MAX_NODES]"""
    lines, counts = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    for nodes in (MAX_NODES, 64):
        memory, proposed = Memory.empty(2, 8, 1, nodes), DraftTree.padding(2, nodes)
        DEVICE.add_text(memory, 0, 0, tree[0])
        for network in (None, proposed):
            DEVICE.grow_joint_tree(memory, lines, network, nodes, 0.0025)
        DEVICE.learn_committed(memory, lines, tree[:, :65], counts, proposed, tree[:, : nodes + 1], 0.1)


def _launch_layer(dtype: torch.dtype) -> None:
    """What a decoder layer asks for beside attention, in the sizes of an 8B model."""
    hidden, weight = torch.randn(4, 4096).to(dtype), torch.zeros(4096, 4096, dtype=dtype)
    for number, pieces in product((1, 32, 64, 128, 256, 2048), (None, Pieces((0, 2016, 4096), whole=False))):
        DEVICE.plan_linear(weight, None, pieces)(torch.zeros(number, 4096, dtype=dtype))
    for delta in (None, hidden):
        DEVICE.add_rms_norm(hidden, delta, hidden[0], 1e-5)
    DEVICE.add_rms_norm(hidden, None, hidden[0], 1e-5, 1.0)
    for gate in (GateForm("silu"), GateForm("gelu_tanh"), GateForm("clamped_swiglu", 7.0), GateForm("sigmoid")):
        DEVICE.gate_mul(torch.randn(4, 2 * 14336).to(dtype), gate)
        run = DEVICE.plan_experts(
            torch.zeros(4, 128, 96, dtype=dtype), torch.zeros(4, 96, 64, dtype=dtype), None, None, gate
        )
        for number in (4, 512):
            run(torch.zeros(number, 96, dtype=dtype), torch.arange(2).repeat(number, 1), torch.ones(number, 2))
    joined, angles = torch.randn(4, 48 * 128).to(dtype), hidden[:, :128].contiguous()
    pool, slots = torch.zeros(2, 10, 8, 128, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    for norms in (None, (angles[0], angles[0]), (joined[0, :4096].clone(), joined[0, :1024].clone())):
        DEVICE.rotary_store(joined, RotaryRows(angles, angles), slots, pool, layers.Heads(32, norms, 1e-5))
    part = angles[:, :64].contiguous()
    DEVICE.rotary_store(joined, RotaryRows(part, part, angles[:, 0].contiguous()), slots, pool, layers.Heads(32))
    DEVICE.rotary_store(joined, None, slots, pool, layers.Heads(32, (angles[0], angles[0]), 1e-5, 1.0))


def _launch_states(dtype: torch.dtype) -> None:
    """Layers with recurrent states, in the sizes of their families."""
    shapes = ("delta", 16, 32, 128, 128), ("mamba", 1, 48, 128, 64), ("convolution",)
    for form in (recurrent.layer(*shape) for shape in shapes):
        extend = torch.zeros(2, form.input_columns, dtype=dtype)
        part = recurrent.Part(0, 1, extend, extend, [-1, 0], [])
        recurrent.advance(DEVICE, form, form.states(dtype, states=2), [part])
    for first in (False, True):
        hidden = torch.zeros(2, 4096, dtype=dtype)
        DEVICE.gated_rms_norm(hidden, hidden, hidden[0, :128], 1e-6, gate_first=first, groups=32)


def main(architecture: int) -> None:
    listing = catch_launches(architecture)
    for dtype in (torch.float32, torch.bfloat16):
        launch_everything(dtype)
    for key, resources in listing.items():
        print(f"{key}: {resources}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
