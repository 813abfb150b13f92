"""CPU kernels: the ops of `kernels` under the same names, implemented in C++ and called through ctypes."""
