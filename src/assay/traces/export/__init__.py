"""Export of training data from the store: selection, anonymization, gates, balancing, formats and files."""
