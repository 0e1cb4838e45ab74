"""`job=explain`: passes, sizes and layouts of a model."""
