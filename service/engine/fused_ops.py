"""What a decoder layer computes beside products and attention, in fewer calls: norms, rotary embeddings, gates.

A decoder of thirty layers has some five hundred such operations per step, and on few rows each costs more to call, or
to launch, than to compute. A part is replaced only where the reference of our op gives the bits of transformers' own on
a CPU, so families that compute something else keep what they have; which kernel serves is the table's affair.
"""

import copy
from collections.abc import Callable
from types import FunctionType, MethodType, SimpleNamespace

import torch
from torch import Tensor, nn

from kernels import ops
from kernels.ops import REFERENCE, Ops
from service.engine.linear import LinearPart

_TRIAL_ROWS = (1, 5, 64)
_ROTARY = "apply_rotary_pos_emb"  # what a family's rotary embedding is called in its module


class FusedRMSNorm(nn.Module):
    """A root-mean-square norm in one call."""

    def __init__(self, weight: nn.Parameter, epsilon: float, rms_norm: Callable[[Tensor, Tensor, float], Tensor]):
        super().__init__()
        self.weight = weight
        self._epsilon = epsilon
        self._rms_norm = rms_norm

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> like x"""
        return self._rms_norm(x, self.weight, self._epsilon)

    __call__ = forward  # nobody hooks a norm, and looking for hooks costs a tenth of it


class GatedMLP(nn.Module):
    """A gated feed-forward layer whose gate reads the joined product as it stands."""

    def __init__(self, joined: nn.Module, down_proj: nn.Module, silu_mul: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.joined = joined
        self.down_proj = down_proj
        self._silu_mul = silu_mul

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> like x"""
        out: Tensor = self.down_proj(self._silu_mul(self.joined(x)))
        return out


@torch.no_grad()
def fuse_layers(model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """Replace what can be replaced below `model`, whose products of one input are joined already.

    -> how many parts of each kind were replaced
    """
    table = ops.on(device)
    norms = sum(_fuse_norm(parent, name, table) for parent, name in _places(model))
    gates = sum(_fuse_gate(parent, name, table, dtype) for parent, name in _places(model))
    return {"norms": norms, "gates": gates, "rotary embeddings": _fuse_rotaries(model, table, dtype)}


def _places(model: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(parent, name) for parent in model.modules() for name, _ in parent.named_children()]


def _fuse_norm(parent: nn.Module, name: str, table: Ops) -> bool:
    norm = parent.get_submodule(name)
    weight, epsilon = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", None)
    if not isinstance(weight, nn.Parameter) or not isinstance(epsilon, float) or not _is_rms_norm(norm, epsilon):
        return False
    setattr(parent, name, FusedRMSNorm(weight, epsilon, table.rms_norm))
    return True


def _is_rms_norm(norm: nn.Module, epsilon: float) -> bool:
    """Whether it gives the reference's bits for a few random rows of uneven size."""
    here = copy.deepcopy(norm).cpu()  # planned transfer: at load
    weight = here.get_parameter("weight")
    trials = (_uneven(rows, weight.shape[0], weight.dtype) for rows in _TRIAL_ROWS)
    return all(torch.equal(here(x), REFERENCE.rms_norm(x, weight, epsilon)) for x in trials)


def _fuse_gate(parent: nn.Module, name: str, table: Ops, dtype: torch.dtype) -> bool:
    mlp = getattr(parent, name)
    gate, up = getattr(mlp, "gate_proj", None), getattr(mlp, "up_proj", None)
    if not isinstance(gate, LinearPart) or not isinstance(up, LinearPart) or gate.fused is not up.fused:
        return False
    if not _is_gate(mlp, dtype):
        return False
    setattr(parent, name, GatedMLP(gate.fused.product, mlp.down_proj, table.silu_mul))
    return True


def _is_gate(mlp: nn.Module, dtype: torch.dtype) -> bool:
    """Whether its class computes down(silu(gate(x)) * up(x)), tried with stand-ins for the three products."""
    gate, up = _uneven(64, 32, dtype), _uneven(65, 32, dtype)[1:]
    stand_in = SimpleNamespace(
        gate_proj=lambda _: gate, up_proj=lambda _: up, down_proj=lambda x: x, act_fn=getattr(mlp, "act_fn", None)
    )
    try:
        found = type(mlp).forward(stand_in, gate)
    except (AttributeError, RuntimeError, TypeError):  # it asks for more than these
        return False
    return isinstance(found, Tensor) and torch.equal(found, REFERENCE.silu_mul(torch.cat([gate, up], dim=-1)))


def _fuse_rotaries(model: nn.Module, table: Ops, dtype: torch.dtype) -> int:
    """Let the attention of each layer find our op under the name of its family's rotary embedding."""
    replaced = 0
    for module in model.modules():
        forward = type(module).forward
        if not isinstance(forward, FunctionType) or _ROTARY not in forward.__code__.co_names:
            continue
        theirs = forward.__globals__.get(_ROTARY)
        if callable(theirs) and _is_rotary(theirs, dtype):
            ours = _finding(forward, {_ROTARY: _or_else(table.rotary, theirs)})
            module.forward = MethodType(ours, module)
            replaced += 1
    return replaced


def _is_rotary(theirs: Callable[..., object], dtype: torch.dtype) -> bool:
    """Whether it gives the reference's bits for queries and keys of a few rows."""
    query, key = (_uneven(heads * 7, 32, dtype).view(1, heads, 7, 32) for heads in (6, 2))
    cos, sin = _uneven(7, 32, dtype).cos()[None], _uneven(7, 32, dtype).sin()[None]
    try:
        found = theirs(query, key, cos, sin)
    except (IndexError, RuntimeError, TypeError):  # it takes something else
        return False
    if not isinstance(found, tuple) or len(found) != 2:
        return False
    return all(map(torch.equal, found, REFERENCE.rotary(query, key, cos, sin)))


def _or_else(ours: Callable[..., object], theirs: Callable[..., object]) -> Callable[..., object]:
    """Ours for what was tried; theirs for calls with more arguments, for heads that are rotated in part and for angles
    of another type."""

    def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *others: object, **named: object) -> object:
        is_tried = (cos.dim(), cos.shape[-1], cos.dtype) == (3, query.shape[-1], query.dtype)
        if others or named or not is_tried:
            return theirs(query, key, cos, sin, *others, **named)
        return ours(query, key, cos, sin)

    return rotary


def _finding(function: FunctionType, found: dict[str, object]) -> FunctionType:
    """The same function, which finds these under some of its global names; nobody else notices."""
    names = {**function.__globals__, **found}
    made = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _uneven(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random rows of uneven size. # -> [rows, width]"""
    generator = torch.Generator().manual_seed(rows)
    drawn = torch.randn(rows, width, generator=generator)
    return (drawn * torch.rand(width, generator=generator).exp2() * 30).to(dtype)
