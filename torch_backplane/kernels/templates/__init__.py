"""Kernels written by hand: one file for each family, text in the common subset of the dialects."""
