"""Public API for `assay loop`."""
