"""Runs of commands: settings, lock, store, meter and model; checks before the first call; the artifact at the end."""
