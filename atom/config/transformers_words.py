"""Arguments of transformers' from_pretrained and generate: what to write here.

Their names are no fields, and what they mean is seldom found by a name that looks alike.
"""

from __future__ import annotations

FROM_TRANSFORMERS = {  # names -> what to do
    "torch_dtype": "write dtype",
    "device_map": "write device; parallel.tensor and parallel.pipeline divide a model among GPUs",
    "max_memory": "write serve.gpu_memory_utilization",
    "attn_implementation": "leave it out: kernels are chosen for the device",
    "load_in_8bit": "write quant.fmt=int8",
    "load_in_4bit": "write quant.fmt=int4",
    "quantization_config": "write quant.fmt=fp8, int8, int4 or mxfp4; a packed checkpoint says itself how it is packed",
    "token use_auth_token": "set HF_TOKEN in the environment",
    "local_files_only": "set HF_HUB_OFFLINE=1 in the environment",
    "cache_dir": "set HF_HOME in the environment; cache is atom's own folder",
    "low_cpu_mem_usage use_safetensors use_cache": "leave it out: it is always so",
    "pad_token_id padding padding_side": "leave it out: prompts of a batch are not padded",
    "max_new_tokens max_length": "write sampling.max_tokens; serve.max_model_len is of prompt and answer together",
    "do_sample": "write sampling.temperature=0 for greedy answers",
    "num_return_sequences": "write sampling.n",
    "num_beams": "there is no beam search; sampling.n draws several answers",
    "eos_token_id": "write sampling.stop_token_ids for more tokens that end an answer",
    "generation_config": "write sampling.defaults, a folder that has one, and sampling.NAME for single values",
    "output_scores output_logits": "write sampling.logprobs",
}
HINTS = {name: hint for names, hint in FROM_TRANSFORMERS.items() for name in names.split()}
