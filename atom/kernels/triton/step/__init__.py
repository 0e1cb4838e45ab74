"""The step on a GPU: inputs, sampling, drafts, copies of blocks."""
