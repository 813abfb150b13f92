"""Triton kernels, one module per op, each the device implementation of a plain-torch reference in `kernels`.
Only `kernels/ops.py` imports from here, and only where the ops are bound to a CUDA device: everything else runs without
Triton installed. Kernels are compiled for shapes that a model fixes, never for what a step holds."""
