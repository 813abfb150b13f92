"""Tensor ops of adaptree: a plain-torch reference of each, which defines it, and device kernels that must equal it.
`__version__` exists because some transformers releases look for one in any importable package named `kernels`."""

__version__ = "0.1.0"
