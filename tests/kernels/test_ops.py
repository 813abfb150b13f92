"""The table of ops: kernels are called as their references are."""

from collections.abc import Callable
from inspect import Parameter, isfunction, signature
from typing import Any

import pytest

from kernels.ops import OPS, REFERENCE, implementation

KERNELS = [
    (name, kernel, getattr(REFERENCE, name))
    for kind in ("triton", "cpu")
    for name in OPS
    if (kernel := getattr(implementation(kind), name)) is not getattr(REFERENCE, name)
]


@pytest.mark.parametrize(("name", "kernel", "reference"), KERNELS)
def test_a_kernel_is_called_as_its_reference(
    name: str, kernel: Callable[..., Any], reference: Callable[..., Any]
) -> None:
    assert _parameters(kernel) == _parameters(reference), name


def _parameters(op: Callable[..., Any]) -> list[Parameter]:
    """All but the smaller ops that an op is made of."""
    return [one for one in signature(op).parameters.values() if not isfunction(one.default)]
