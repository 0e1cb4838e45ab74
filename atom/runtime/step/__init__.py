"""Run a step: StepInput, request state, model, CUDA graphs."""
