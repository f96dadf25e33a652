"""The revisions of the store's tables, oldest first.

To add one: change `tables.py`, write `rNNNN_what.py` here with `upgrade()`, raise `REVISION` in `location.py`. On
SQLite a column is changed in `op.batch_alter_table(...)`. There is no downgrade: an older version of assay refuses a
newer store.
"""
