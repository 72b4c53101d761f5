"""Triton kernels for CUDA; with TRITON_INTERPRET=1 the same code runs on a CPU, slowly.

Importing a module of this package imports Triton, so backends import them where they launch them.
"""
