"""Helpers for all packages: lazy names, short reprs, removal of secrets, settings. Imports only errors of assay."""
