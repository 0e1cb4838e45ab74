"""ROCm/ATOM's commands: their flags and vLLM's, written as overrides.

python -m atom.entrypoints.openai_server --model /models/qwen3 --server-port 8000
python -m atom.entrypoints.run_batch -i batch.jsonl -o results.jsonl --model /models/qwen3
python -m atom.examples.simple_inference --model /models/qwen3 --temperature 0.6
"""
