"""Benchmarks: correctness first, then medians and spread side by side in one run, stamped with the machine."""
