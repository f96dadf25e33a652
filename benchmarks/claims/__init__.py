"""The measurements behind `benchmarks/figures.py`, one module for each."""
