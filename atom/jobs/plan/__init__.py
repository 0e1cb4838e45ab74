"""`job=plan`: layouts and formats of a model on GPUs, by estimated cost."""
