"""Linears in Triton: GEMVs, GEMMs of few rows, packed weights, adapters, tuning."""
