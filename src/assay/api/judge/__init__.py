"""`assay judge`: compile a judge against human labels, and use one."""
