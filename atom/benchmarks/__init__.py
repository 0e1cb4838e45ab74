"""Measure a server over HTTP: any server that speaks a known protocol.

    python -m atom.benchmarks.benchmark_serving --model M --base-url http://localhost:8000 --dataset-name random
    python -m atom.benchmarks.matrix --model M --tp 1 2 --concurrency 4 8 16 --result-dir results
    python -m atom.benchmarks.compare results/before results/after

It imports nothing else of atom, and no torch: it may run on a machine without them. It needs the extra `bench`.
"""
