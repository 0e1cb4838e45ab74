"""Flags of vLLM and ROCm/ATOM that are refused, and what to use instead.

refusal_of("--preemption-mode=swap")        # "whether blocks are swapped follows from --swap-space; leave it out"
refusal_of("--seed")                # None: it is taken, or unknown

The parser refuses by this list; docs/from-vllm.md and docs/from-rocm-atom.md show it, which tests/entrypoints holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# what to use instead, or why it has no meaning here -> the flags, without their --
VLLM_REFUSED = {
    "all adapters that are loaded are on the device: --max-loras counts them; leave it out": "max-cpu-loras",
    "an adapter adds no tokens here; leave it out": "lora-extra-vocab-size",
    "the factors of adapters are divided as their linears are; leave it out": "fully-sharded-loras",
    "models read text alone here: name the adapter as a request's model": "default-mm-loras",
    "models read text alone here; leave it out": """
        limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs mm-processor-cache-gb
        disable-mm-preprocessor-cache mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-tp-mode
        mm-encoder-attn-backend interleave-mm-strings skip-mm-profiling video-pruning-rate allowed-local-media-path
        allowed-media-domains disable-chunked-mm-input enable-multimodal-encoder-data-parallel io-processor-plugin
        enable-prompt-embeds""",
    "it is vLLM's older name; give --pooler-config": """
        override-pooler-config""",
    "it is the checkpoint's own; give a checkpoint that has the right one": """
        tokenizer tokenizer-revision code-revision hf-config-path skip-tokenizer-init""",
    "set the environment's HF_TOKEN": "hf-token",
    "set the model's own field with --set, as --set model.attention.rope.theta=1e6": """
        hf-overrides rope-scaling rope-theta""",
    "set the model's own field: --set model.attention.window=null": "disable-sliding-window",
    "kernels are chosen call by call; job.stage=select_kernels shows which": """
        attention-backend disable-cascade-attn override-attention-dtype""",
    "weights are read from mapped files, by all cores; leave it out": """
        safetensors-load-strategy model-loader-extra-config ignore-patterns pt-load-map-location
        max-parallel-loading-workers""",
    "llguidance is the one library for grammars; leave it out": """
        structured-outputs-config guided-decoding-backend guided-decoding-disable-fallback
        guided-decoding-disable-any-whitespace guided-decoding-disable-additional-properties""",
    "the processors of logits are those of a request's fields; leave it out": """
        logits-processors logits-processor-pattern""",
    "one engine is one host's, or its ranks are started by torchrun, srun or Ray: see docs/parallel.md": """
        nnodes node-rank master-addr master-port headless data-parallel-rank data-parallel-start-rank
        data-parallel-size-local data-parallel-address data-parallel-rpc-port data-parallel-backend
        data-parallel-hybrid-lb data-parallel-external-lb ray-workers-use-nsight worker-cls worker-extension-cls""",
    "how experts are placed and exchanged follows from --enable-expert-parallel; leave it out": """
        all2all-backend enable-dbo dbo-decode-token-threshold dbo-prefill-token-threshold enable-eplb eplb-config
        expert-placement-strategy num-redundant-experts eplb-window-size eplb-step-interval eplb-log-balancedness
        disable-nccl-for-dp-synchronization""",
    "whether blocks are swapped follows from --swap-space; leave it out": "preemption-mode",
    "--swap-space keeps KV in host memory; leave it out": "kv-offloading-size kv-offloading-backend",
    "prefixes are told apart by a hash and compared on a hit; leave it out": "prefix-caching-hash-algo",
    "no KV leaves its engine; leave it out": """
        kv-transfer-config kv-events-config kv-sharing-fast-prefill""",
    "models with such a state are not built; leave it out": """
        mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size""",
    "the scheduler plans a step by --max-num-batched-tokens and --max-num-seqs alone; leave it out": """
        max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold num-lookahead-slots
        num-scheduler-steps scheduler-cls stream-interval""",
    "KV is managed by its kind in every model; leave it out": "disable-hybrid-kv-cache-manager",
    "write --cudagraph-capture-sizes, a list of batch sizes": "cuda-graph-sizes max-cudagraph-capture-size",
    "write --level 0, 1, 2 or 3, which mean something else than vLLM's: see --help": """
        compilation-config O cc optimization-level""",
    "write --speculative-config: see docs/speculation.md": """
        speculative-model ngram-prompt-lookup-max ngram-prompt-lookup-min""",
    "there is no such extension here; leave it out": """
        additional-config middleware tool-parser-plugin reasoning-parser-plugin tool-server""",
    "the span of each request has all that is measured of it: --otlp-traces-endpoint": "collect-detailed-traces",
    "metrics have one set of names; --set serve.http.vllm_metrics=true adds vLLM's": """
        show-hidden-metrics-for-version""",
    "no client's words are logged: the line of each request has its counts, times and error": """
        enable-log-requests enable-log-outputs max-log-len""",
    "--set serve.http.log_level=warning leaves out the lines of requests": "uvicorn-log-level",
    "--set serve.http.log=json or text chooses the form of the log": """
        log-config-file log-error-stack disable-access-log-for-endpoints aggregate-engine-logging""",
    "a request says so itself: stream_options.include_usage": "enable-force-include-usage",
    "a request says so itself: return_token_ids": "return-tokens-as-token-ids",
    "a request says so itself: tools with tool_choice=none are left out of the prompt": """
        exclude-tools-when-tool-choice-none""",
    "a chat template is code, and comes from this command line alone: --chat-template": "trust-request-chat-template",
    "a tokenizer's files are not served; fetch them from the hub": "enable-tokenizer-info-endpoint",
    "every path but /health and /ping needs a key where --api-key is set; leave it out": "disable-fastapi-docs",
    "pages of --allowed-origins may send every method and header, and no cookies; leave it out": """
        allow-credentials allowed-methods allowed-headers""",
    "put a proxy in front, which asks clients for certificates": """
        ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh""",
    "there is no Unix socket; write --host 127.0.0.1, which only this machine reaches": "uds",
    "--set serve.http.max_header=BYTES limits the head of a request": """
        h11-max-incomplete-event-size h11-max-header-count""",
}
ROCM_REFUSED = {
    "no client's words are logged: the line of each request has its counts, times and error": "request-log",
}


def refused(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The flags of a list and the reason of each."""
    for reason, names in reasons.items():
        for name in names.split():
            yield name, reason


REFUSED = dict(refused(VLLM_REFUSED)) | dict(refused(ROCM_REFUSED))


def refusal_of(text: str) -> str | None:
    """Why a word of a command line is refused, as --preemption-mode=swap or -O3; None where it is not."""
    match = re.match(r"--(?:no-)?([\w-]+)|-(O|cc)(?=$|[\W\d])", text)
    return None if match is None else REFUSED.get(match[2] or match[1].replace("_", "-"))
