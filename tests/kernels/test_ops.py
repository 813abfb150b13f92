"""The table of ops: kernels are called as their references are."""

from inspect import signature

import pytest

from kernels.ops import OPS, REFERENCE, has_twin, twin

TWINS = [(op, kind) for kind in ("triton", "cpu") for op in OPS if has_twin(op, kind)]


@pytest.mark.parametrize(("op", "kind"), TWINS)
def test_a_kernel_is_called_as_its_reference(op: str, kind: str) -> None:
    found, expected = signature(twin(op, kind)).parameters, signature(getattr(REFERENCE, op)).parameters
    assert list(found.values()) == list(expected.values())
