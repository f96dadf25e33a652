"""Prompt optimization: the search of `auto`, and DSPy's own teleprompters."""
