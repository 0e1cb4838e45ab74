"""Scripts that ROCm/ATOM's users know, and one that trains.

python -m atom.examples.simple_inference --model /models/qwen3
python -m atom.examples.profile_offline --model /models/qwen3 --bs 4
python -m atom.examples.grpo                                  # a trainer and a server
"""
