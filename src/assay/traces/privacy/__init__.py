"""Anonymization of training data: the anonymizer, and the detectors of patterns and names."""
