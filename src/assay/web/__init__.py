"""The local page of `assay view`: runs, rollouts and comparisons of a store, in a browser.

Reads the store and writes ratings. Does not call a model or run a program.
"""
