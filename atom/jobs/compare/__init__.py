"""`job=compare`: find where two ways of running a model part."""
