"""Judge optimization against human labels."""
