"""Run a step: numbers from a plan, request state, model, CUDA graphs."""
