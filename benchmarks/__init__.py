"""Benchmarks: correctness first, then medians and spread in one run, stamped with the machine."""
