"""The table of ops: kernels are called as their references are."""

from collections.abc import Callable
from inspect import signature
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
    found, expected = signature(kernel).parameters, signature(reference).parameters
    assert list(found.values()) == list(expected.values()), name
