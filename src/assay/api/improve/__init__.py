"""`assay improve`: prompts and weights in turn, each step gated."""
