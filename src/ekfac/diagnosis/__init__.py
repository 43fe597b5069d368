"""Some fifty probe steps on a copy of a model, then a page on what to expect and what to set."""
