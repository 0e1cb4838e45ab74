"""The flags of ROCm/ATOM's server, as its sources of November 2026 add them: model_engine/arg_utils.py and api_server.py.

Short ones have their -, long ones are without their --, and with - in place of _.
"""

FLAGS = """
all2all-backend attn-prefill-chunk-size block-size cache-hit-rate-window chat-template cudagraph-capture-sizes
cudagraph-mode data-parallel-base-port data-parallel-master-ip data-parallel-master-port data-parallel-rank
data-parallel-size data-parallel-size-local -dcp dcp-config decode-context-parallel-size
default-chat-template-kwargs disable-uvicorn-access-log disagg-constrained disagg-prefill-max-num-seqs -dp
dp-load-balance draft-model dspark-config enable-chunked-prefill enable-dp-attention enable-eplb
enable-expert-parallel enable-log-stats enable-prefix-caching enable-rapidserve enable-tbo enforce-eager eplb-config
eplb-enable fake-eplb gpu-memory-utilization hf-overrides host index-cache-dtype kv-cache-dtype kv-transfer-config
level load-dummy long-prefill-token-threshold mark-trace max-model-len max-num-batched-tokens max-num-seqs method
model moe-backend num-speculative-tokens online-quant-config -pcp pipeline-parallel-size port -pp
prefill-context-parallel-size request-log scheduler-delay-factor served-model-name server-port
spec-decode-acceptance-length spec-decode-acceptance-rate state-checkpoint-demand state-checkpoint-interval-tokens
tensor-parallel-size throughput-log-interval timeout-keep-alive tool-call-parser torch-profiler-dir -tp
trust-remote-code
"""
