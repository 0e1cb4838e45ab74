"""The step on a CPU: inputs, sampling, drafts, copies of blocks."""
