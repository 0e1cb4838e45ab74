"""Flags of vLLM and ROCm/ATOM that are refused, and what to use instead.

refusal_of("--preemption-mode=swap")        # "whether blocks are swapped follows from --swap-space; leave it out"
refusal_of("--seed")                # None: it is taken, or unknown

The parser refuses by this list; docs/from-vllm.md and docs/from-rocm-atom.md show it, which tests/entrypoints holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# what to use instead, or why it has no meaning here -> the flags, without their --; short ones with their -
# vLLM's are those of 0.26 to 0.33, and older ones
VLLM_REFUSED = {
    "all adapters that are loaded are on the device: --max-loras counts them; leave it out": "max-cpu-loras",
    "an adapter adds no tokens here; leave it out": "lora-extra-vocab-size",
    "the factors of adapters are divided as their linears are; leave it out": "fully-sharded-loras",
    "an adapter has the linears that its files have; leave it out": "lora-target-modules",
    "experts' adapters are read as PEFT writes them, with --set serve.lora_experts=true": """
        enable-mixed-moe-lora-format enable-moe-shared-loras""",
    "every step has room for --max-loras adapters; leave it out": "specialize-active-lora",
    "labels are those of the checkpoint; leave it out": "max-lora-cls-labels",
    "an adapter is of a request: name it as the request's model": "default-mm-loras",
    "images are read as docs/images.md says, within limits as --set serve.max_images=8; leave it out": """
        limit-mm-per-prompt enable-mm-embeds media-io-kwargs mm-processor-kwargs mm-processor-cache-gb
        disable-mm-preprocessor-cache mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-tp-mode
        mm-encoder-attn-backend interleave-mm-strings skip-mm-profiling video-pruning-rate allowed-local-media-path
        disable-chunked-mm-input enable-multimodal-encoder-data-parallel io-processor-plugin
        enable-prompt-embeds mm-encoder-only mm-encoder-attn-dtype mm-encoder-fp8-scale-path
        mm-encoder-fp8-scale-save-path mm-encoder-fp8-scale-save-margin mm-tensor-ipc mm-ipc-gpu-memory-gb
        mm-device-do-normalize mm-hasher-algorithm mm-processor-device video-pruning-method trust-request-mm-kwargs
        ec-transfer-config ec-manager-config enable-tower-connector-lora enable-shm-tensor-arena""",
    "images are fetched from the servers of --set serve.image_domains=[images.example.org]": "allowed-media-domains",
    "it is vLLM's older name; give --pooler-config": """
        override-pooler-config""",
    "an embedding is one vector of a text; leave it out": "enable-flash-late-interaction",
    "it is the checkpoint's own; give a checkpoint that has the right one": """
        tokenizer tokenizer-revision code-revision hf-config-path skip-tokenizer-init""",
    "a checkpoint says how it is packed, and --quantization=fp8 packs a plain one: see docs/quantization.md": """
        quantization-config""",
    "every quantization that is read may be used; leave it out": "allow-deprecated-quantization",
    "a model is a YAML file: see docs/extend.md": "model-class-overrides",
    "a batch opens no port; leave it out": "enable-metrics",
    "results are written to the file of -o as they come; leave it out": "output-tmp-dir",
    "set the environment's HF_TOKEN": "hf-token",
    "set the environment's CUDA_VISIBLE_DEVICES": "device-ids",
    "start the command under numactl": "numa-bind numa-bind-nodes numa-bind-cpus",
    "of vLLM's variables VLLM_API_KEY and VLLM_BATCH_INVARIANT are read; leave it out": "fail-on-environ-validation",
    "set the model's own field with --set, as --set model.attention.rope.theta=1e6": """
        rope-scaling rope-theta""",
    "set the model's own field: --set model.attention.window=null": "disable-sliding-window",
    "kernels are chosen call by call; job.stage=select_kernels shows which": """
        attention-backend attention-config -ac disable-cascade-attn override-attention-dtype moe-backend linear-backend
        kernel-config ir-op-priority enable-bf16x3-router-gemm monokernel sparse-indexer-topk-backend""",
    "kernels and CUDA graphs are chosen by the size of a step; leave it out": "performance-mode",
    "FlashInfer is not used; atom-run job=compile tune=true measures a model's matmuls, once": """
        enable-flashinfer-autotune""",
    "compiling is shown at the start, and job=compile does it ahead of one; leave it out": """
        jit-monitor-mode jit-monitor-verbose""",
    "draws use noise in fp32; leave it out": "use-fp64-gumbel",
    "weights are read from mapped files, by all cores; leave it out": """
        safetensors-load-strategy model-loader-extra-config ignore-patterns pt-load-map-location
        max-parallel-loading-workers safetensors-prefetch-num-threads safetensors-prefetch-block-size""",
    "weights stay on their device: divide them by --tensor-parallel-size, or pack them by --quantization=fp8": """
        offload-backend offload-group-size offload-num-in-group offload-prefetch-step offload-params""",
    "weights stay what they are while an engine runs; leave it out": "weight-transfer-config",
    "--enable-sleep-mode needs nothing else; leave it out": """
        enable-cumem-allocator sleep-mode-backend sleep-mode-offload-cudagraph sleep-preserve-parameter-names
        enable-nccl-comm-suspend""",
    "llguidance is the one library for grammars; leave it out": """
        structured-outputs-config guided-decoding-backend guided-decoding-disable-fallback
        guided-decoding-disable-any-whitespace guided-decoding-disable-additional-properties""",
    "the processors of logits are those of a request's fields; leave it out": """
        logits-processors logits-processor-pattern""",
    "one engine is one host's, or its ranks are started by torchrun, srun or Ray: see docs/parallel.md": """
        nnodes -n node-rank -r master-addr master-port headless data-parallel-rank -dpn data-parallel-start-rank -dpr
        data-parallel-size-local -dpl data-parallel-address -dpa data-parallel-rpc-port -dpp data-parallel-backend -dpb
        data-parallel-hybrid-lb -dph data-parallel-external-lb -dpe ray-workers-use-nsight worker-cls
        worker-extension-cls""",
    "--data-parallel-size runs several engines in one server, which restarts them; leave it out": """
        data-parallel-multi-port-external-lb -dpm data-parallel-supervisor-port dp-supervisor-probe-interval-s
        dp-supervisor-probe-timeout-s dp-supervisor-probe-failure-threshold dp-sync-interval enable-fault-tolerance
        fault-tolerance-config""",
    "a rank that runs is waited for; --set advanced.heartbeat_seconds=300 is for how long one may hang": """
        distributed-timeout-seconds cpu-distributed-timeout-seconds watchdog-config""",
    "a sequence's KV is not divided; leave it out": """
        cp-kv-cache-interleave-size dcp-kv-cache-interleave-size dcp-comm-backend dcp-q-replicate""",
    "how ranks draw tokens follows from --tensor-parallel-size; leave it out": "enable-batch-sharded-sampling",
    "how experts are placed and exchanged follows from --enable-expert-parallel; leave it out": """
        all2all-backend enable-dbo dbo-decode-token-threshold dbo-prefill-token-threshold enable-eplb eplb-config
        expert-placement-strategy num-redundant-experts eplb-window-size eplb-step-interval eplb-log-balancedness
        disable-nccl-for-dp-synchronization ubatch-size enable-elastic-ep elastic-ep-max-dp-size""",
    "whether blocks are swapped follows from --swap-space; leave it out": "preemption-mode",
    "--swap-space keeps KV in host memory; leave it out": "kv-offloading-size kv-offloading-backend",
    "prefixes are looked up by a hash and compared on a hit; leave it out": "prefix-caching-hash-algo",
    "prefixes are shared in blocks of --block-size tokens; leave it out": "prefix-match-unit",
    "the prefix cache keeps what was used last; leave it out": "prefix-cache-retention-interval swa-bounded-replay",
    "the KV of every layer has the dtype of --kv-cache-dtype; leave it out": "kv-cache-dtype-skip-layers",
    "no KV leaves its engine; leave it out": """
        kv-transfer-config kv-events-config kv-sharing-fast-prefill""",
    "model.state_dtype, serve.state_memory and serve.state_interval configure recurrent state; leave it out": """
        mamba-cache-dtype mamba-ssm-cache-dtype mamba-block-size mamba-backend mamba-cache-mode
        mamba-cache-philox-rounds enable-mamba-cache-stochastic-rounding mamba-ssu-algorithm
        enable-mamba-shared-prefix-checkpoint enable-mamba-fine-grained-prefix-cache use-replayssm replayssm-buffer-len
        gdn-prefill-backend kda-prefill-backend kda-decode-backend""",
    "models of this kind are not supported; leave it out": "diffusion-config -dc engram-config enable-hc-sp",
    "the scheduler plans a step only by --max-num-batched-tokens and --max-num-seqs; leave it out": """
        num-lookahead-slots num-scheduler-steps scheduler-cls stream-interval max-num-scheduled-tokens
        prefill-schedule-interval scheduler-reserve-full-isl watermark""",
    "--set serve.max_itl_ms=30 sizes the chunks of prompts while others decode": """
        max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold
        long-prefill-token-threshold-adaptive""",
    "write --max-num-seqs, which bounds what runs": "max-num-active-seqs",
    "write --max-num-queued-reqs, which counts requests": "max-num-queued-tokens",
    "KV is managed by its kind in every model; leave it out": "disable-hybrid-kv-cache-manager",
    "write --cudagraph-capture-sizes, a list of batch sizes": "cuda-graph-sizes max-cudagraph-capture-size",
    "write --level 0, 1, 2 or 3, which mean something else than vLLM's: see --help": """
        compilation-config -cc optimization-level -O""",
    "write --speculative-config: see docs/speculation.md": """
        speculative-model ngram-prompt-lookup-max ngram-prompt-lookup-min""",
    "a parser of tool calls is a YAML file, not code: write --tool-call-parser FILE.yaml, see docs/tool-calls.md": """
        tool-parser-plugin""",
    "there is no such extension here; leave it out": """
        additional-config middleware reasoning-parser-plugin tool-server""",
    "the span of each request has all that is measured of it: --otlp-traces-endpoint": """
        collect-detailed-traces enable-per-request-metrics""",
    "/metrics counts drafted tokens, of all requests: see docs/speculation.md": "per-request-spec-decode-metrics",
    "/metrics has one set of metrics and buckets: see docs/serving.md": """
        kv-cache-metrics kv-cache-metrics-sample cudagraph-metrics enable-mfu-metrics custom-histogram-buckets""",
    "no statistics are logged; /metrics has them": "enable-logging-iteration-details",
    "write --torch-profiler-dir; --set serve.profiler_more=true adds shapes, stacks and memory": "profiler-config",
    "--torch-profiler-dir and job=profile show the time of every kernel; leave it out": """
        enable-layerwise-nvtx-tracing""",
    "metrics have one set of names; --set serve.http.vllm_metrics=true adds vLLM's": """
        show-hidden-metrics-for-version""",
    "no client's words are logged: the line of each request has its counts, times and error": """
        enable-log-requests enable-log-outputs enable-log-deltas max-log-len""",
    "--log-level=warning leaves out the lines of requests": "uvicorn-log-level",
    "--set serve.http.log=json or text chooses the form of the log": """
        log-config-file logging-config log-error-stack disable-access-log-for-endpoints aggregate-engine-logging""",
    "a request says so itself: stream_options.include_usage": "enable-force-include-usage",
    "a request says so itself: return_tokens_as_token_ids": "return-tokens-as-token-ids",
    "an answer has only its text, tokens and log probabilities; leave it out": """
        enable-return-routed-experts return-sampling-mask enable-trace-replay aux-output-config""",
    "answers have no system_fingerprint; leave it out": "fingerprint-mode fingerprint-value",
    "answers bear no watermark; leave it out": "watermark-config",
    "a request's thinking_token_budget forces the model's own marker; write --reasoning-parser": "reasoning-config",
    "a request's reasoning_effort becomes the nearest level of the chat template; leave it out": "reasoning-effort-map",
    "thinking of type disabled sets the chat template's own variable; leave it out": """
        anthropic-disabled-thinking-effort""",
    "calls that tool_choice forces keep to their schema, whatever strict says; leave it out": "tool-strict-level",
    "a request says so itself: tools with tool_choice=none are left out of the prompt": """
        exclude-tools-when-tool-choice-none""",
    "a chat template is code, and comes only from this command line: --chat-template": "trust-request-chat-template",
    "a completion's prompt may be token ids, and return_token_ids gives those of the answer; leave it out": """
        tokens-only enable-scale-out""",
    "there is no API of Cohere's; leave it out": "cohere-format cohere-is-reasoning-model",
    "a few threads render and tokenize; leave it out": "renderer-num-workers",
    "the server speaks only HTTP; leave it out": "grpc grpc-port",
    "/docs asks no other host for anything; leave it out": "enable-offline-docs",
    "every path but /health and /ping needs a key if --api-key is set; leave it out": "disable-fastapi-docs",
    "pages of --allowed-origins may send every method and header, and no cookies; leave it out": """
        allow-credentials allowed-methods allowed-headers""",
    "put a proxy in front, which asks clients for certificates": """
        ssl-ca-certs ssl-cert-reqs ssl-ciphers enable-ssl-refresh""",
    "there is no Unix socket; write --host 127.0.0.1, which only this machine reaches": "uds",
    "--set advanced.max_header=BYTES limits the head of a request": """
        h11-max-incomplete-event-size h11-max-header-count""",
}
ROCM_REFUSED = {  # those of November 2026 that vLLM has not
    "no client's words are logged: the line of each request has its counts, times and error": "request-log",
    "a request goes to the engine that has most of its prompt cached, or to the one with the fewest; leave it out": """
        dp-load-balance""",
    "write --level: 3 captures CUDA graphs of whole steps, 2 and below none": "cudagraph-mode",
    "how experts are placed and exchanged follows from --enable-expert-parallel; leave it out": """
        enable-tbo eplb-enable""",
    "experts are those that the router chooses, with --load-dummy too; leave it out": "fake-eplb",
    "one engine is one host's, or its ranks are started by torchrun, srun or Ray: see docs/parallel.md": """
        data-parallel-master-ip data-parallel-master-port data-parallel-base-port""",
    "a sequence's KV is not divided; leave it out": "dcp-config",
    "the KV of every layer has the dtype of --kv-cache-dtype; leave it out": "index-cache-dtype",
    "attention takes the tokens of a step at once: write --max-num-batched-tokens": "attn-prefill-chunk-size",
    "set the tokens between copies of the state: --set serve.state_interval=64": """
        state-checkpoint-interval-tokens state-checkpoint-demand""",
    "prompts and decodes share a step: write --max-num-batched-tokens, which bounds both": """
        enable-rapidserve disagg-prefill-max-num-seqs disagg-constrained""",
    "only --method, --draft-model and --num-speculative-tokens make drafts; leave it out": "dspark-config",
    "write --spec-decode-acceptance-length: 1 + the rate times --num-speculative-tokens": "spec-decode-acceptance-rate",
    "no statistics are logged; /metrics has them": "enable-log-stats throughput-log-interval cache-hit-rate-window",
    "--torch-profiler-dir and job=profile show the time of every kernel; leave it out": "mark-trace",
    "an idle connection is kept for 65 s; leave it out": "timeout-keep-alive",
}


def refused(reasons: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The flags of a list and the reason of each."""
    for reason, names in reasons.items():
        for name in names.split():
            yield name, reason


REFUSED = dict(refused(VLLM_REFUSED)) | dict(refused(ROCM_REFUSED))


def refusal_of(text: str) -> str | None:
    """Why a word of a command line is refused, as --preemption-mode=swap or -O3; None if it is not."""
    match = re.match(r"--(?:no-)?([\w-]+)|(-[A-Za-z]+)(?=$|[\W\d])", text)
    return None if match is None else REFUSED.get(match[2] or match[1].replace("_", "-"))


def with_dashes(name: str) -> str:
    """A name of the lists above as it is typed."""
    return name if name.startswith("-") else f"--{name}"
