"""Tensor functions of adaptree: a plain-torch reference for each, and the device kernels that must equal it.
The version is kept because some transformers releases probe any importable package of this name for one."""

__version__ = "0.1.0"
