"""Scripts that ROCm/ATOM's users know, and that show how little `LLMEngine` takes.

python -m atom.examples.simple_inference --model /models/qwen3
python -m atom.examples.profile_offline --model /models/qwen3 --bs 4
"""
