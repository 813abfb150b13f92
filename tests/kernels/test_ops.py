"""The table of ops: each has a device kernel that is called as its reference is."""

from inspect import signature

import pytest

from kernels.ops import OPS, REFERENCE, twin


@pytest.mark.parametrize("op", OPS)
def test_a_device_kernel_is_called_as_its_reference(op: str) -> None:
    found, expected = signature(twin(op)).parameters, signature(getattr(REFERENCE, op)).parameters
    assert list(found.values()) == list(expected.values())
