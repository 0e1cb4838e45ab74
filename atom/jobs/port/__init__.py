"""`job=port`: draft a model file for an architecture that atom does not know."""
