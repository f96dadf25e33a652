"""Public API for `assay deploy`, one module per command."""
