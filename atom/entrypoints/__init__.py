"""ROCm/ATOM's commands: their flags are written as overrides of the one configuration, and nothing more.

python -m atom.entrypoints.openai_server --model /models/qwen3 --server-port 8000
python -m atom.examples.simple_inference --model /models/qwen3 --temperature 0.6
"""
