"""A capture without a device: records the operations on tensors that a computation makes, and repeats these alone.

Nothing of the computation's own Python runs again, so that a value which was frozen while capturing stays frozen, as it
would on a device. What a device could not capture is refused: to read a value, to copy one from the host, sizes that
depend on values. Ops whose reference reads on the host stand for kernels and are recorded as one operation each.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from kernels import ops
from kernels.ops import Ops
from kernels.tree_attention import Attention, AttentionForm

_REFUSED = (
    "aten._local_scalar_dense",
    "aten.is_nonzero",
    "aten.equal",
    "aten.nonzero",
    "aten.masked_select",
    "aten._unique",
    "aten.unique",
    "aten.bincount",
)
_recording: list["TensorProgram"] = []


class _Step(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


class TensorProgram(TorchDispatchMode):
    """Operations in the order in which they were made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._steps: list[_Step] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        masks = str(func).startswith("aten.index") and any(_is_mask(index) for index in _indices(args))
        assert not masks, f"a boolean mask in {func}: its result's size depends on values"
        uploads = str(func).startswith("aten.lift_fresh") and args[0].ndim > 0  # numbers travel with their operation
        refused = uploads or str(func).startswith(_REFUSED)
        assert not refused, f"{func} cannot be captured"
        return self.run(func, *args, **(kwargs or {}))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run and record one operation."""
        result = function(*args, **kwargs)
        self._steps.append(_Step(function, args, kwargs, result))
        return result

    def repeat(self) -> None:
        """All operations again, on what tensors from outside hold now."""
        made: dict[int, Any] = {}

        def now(value: Any) -> Any:
            return made.get(id(value), value)

        for function, args, kwargs, result in self._steps:
            again = function(*_map(now, args), **_map(now, kwargs))
            made.update((id(one), other) for one, other in zip(_values(result), _values(again), strict=True))


def record(compute: Callable[[], None]) -> Callable[[], None]:
    """The capture, see `kernels.graph_runner.Capture`."""
    compute()  # as on a device, where libraries choose their algorithms first
    program = TensorProgram()
    _recording.append(program)
    try:
        with program:
            compute()
    finally:
        _recording.pop()
    return program.repeat


@contextmanager
def kernels() -> Iterator[None]:
    """While it lasts, what is compiled for this processor stands for kernels, as do references that read there."""
    own = ops.on(torch.device("cpu"))
    memory = ("add_text", "grow_joint_tree", "learn_committed")
    plain = (
        "add_rms_norm",
        "rotary_store",
        "gate_mul",
        "choose_experts",
        "choose_likeliest",
        "sample",
        "rank_features",
        *memory,
    )
    table = Ops(
        plan_linear=lambda *args: _kernel(own.plan_linear(*args)),
        plan_experts=lambda *args: _kernel(own.plan_experts(*args)),
        plan_attention=_kernel(lambda *args, **kwargs: _Attention(own.plan_attention(*args, **kwargs))),
        **{name: _kernel(getattr(own, name)) for name in plain},
    )
    before = ops._table
    ops._table = lambda device_type: table  # type: ignore[assignment]
    try:
        yield
    finally:
        ops._table = before


class _Attention:
    """A plan whose layers are operations too."""

    def __init__(self, plan: Attention) -> None:
        self.plan = plan

    def attend(self, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
        attended: Tensor = _kernel(_attend)(self, query, pool, form)
        return attended


def _attend(attention: _Attention, query: Tensor, pool: Tensor, form: AttentionForm) -> Tensor:
    return attention.plan.attend(query, pool, form)


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _recording:
            return function(*args, **kwargs)
        with _disable_current_modes():
            return _recording[-1].run(function, *args, **kwargs)

    return run


def _indices(args: tuple[Any, ...]) -> list[Any]:
    return [part for arg in args[1:2] for part in (arg if isinstance(arg, (list, tuple)) else [arg])]


def _is_mask(index: object) -> bool:
    return isinstance(index, Tensor) and index.dtype == torch.bool


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested values, changed one by one."""
    if isinstance(value, tuple):
        mapped = (_map(change, part) for part in value)
        return type(value)(*mapped) if hasattr(value, "_fields") else tuple(mapped)
    if isinstance(value, list):
        return [_map(change, part) for part in value]
    if isinstance(value, Mapping):
        return {key: _map(change, part) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_map(change, getattr(value, field.name)) for field in fields(value)))
    return change(value)


def _values(result: Any) -> list[Any]:
    """Of an operation's result, what later ones can be called with."""
    if isinstance(result, (tuple, list)):
        return [value for part in result for value in _values(part)]
    return [result] if isinstance(result, (Tensor, _Attention)) else []
