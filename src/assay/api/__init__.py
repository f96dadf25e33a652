"""The public Python functions, one module per command: `assay.compile` is `api/compile.py`."""
