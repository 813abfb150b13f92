"""Kernels compiled for this processor: the ops of `kernels`, under the same names, from C++ without a framework."""
