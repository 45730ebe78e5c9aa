"""Sequences that are cut over the ranks of a process group."""
