"""Judge quality: agreement with human labels, audit, drift, ranking, reliability card. Calls no model."""
