"""Measure a server over HTTP: any server that speaks a known protocol.

    python -m atom.benchmarks.benchmark_serving --model M --base-url http://localhost:8000 --dataset-name random
    python -m atom.benchmarks.matrix --model M --tp 1 2 --concurrency 4 8 16 --result-dir results
    python -m atom.benchmarks.compare results/before results/after

Of atom it imports what is measured (`atom.measurement`) and nothing else, and no torch: it may run on a machine that
has neither. It needs the extra `bench`.
"""
