"""Triton kernels: device implementations of the plain-torch references in `kernels`, in modules of the same names.
Only `kernels/ops.py` imports them, and only to bind ops to a CUDA device: everything else runs without Triton. Kernels
are specialised for sizes that a model fixes, never for sizes that change from step to step."""
