def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(12, 1000000.0))    # fp32[T, 6], fp32[T, 6]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    h = torch.rms_norm(x, W("model.layers.0.input_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    qkv = cpp.linear(h, shuffle(cat([W("model.layers.0.self_attn.q_proj.weight", bf16[48, 48]), W("model.layers.0.self_attn.k_proj.weight", bf16[24, 48]), W("model.layers.0.self_attn.v_proj.weight", bf16[24, 48])]), "blocks"))    # bf16[T, 96]
    q, k, v = reference.split(qkv, sizes=[48, 24, 24])    # bf16[T, 48], bf16[T, 24], bf16[T, 24]
    q_1 = reference.split_heads(q, heads=4)    # bf16[T, 4, 12]
    k_1 = reference.split_heads(k, heads=2)    # bf16[T, 2, 12]
    v_1 = reference.split_heads(v, heads=2)    # bf16[T, 2, 12]
    q_2 = cpp.norm_rope_write(q_1, k_1, v_1, cos, sin, None, None, KV("model.layers.0", bf16[2, 2, 12]), batch)    # bf16[T, 4, 12]
    a = cpp.paged_attention(q_2, KV("model.layers.0", bf16[2, 2, 12]), batch, scale=0.28867513459481287)    # bf16[T, 4, 12]
    a_1 = reference.merge_heads(a)    # bf16[T, 48]
    o = torch.linear(a_1, shuffle(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 48]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    h_1, x_1 = torch.add_rms_norm(x, o, W("model.layers.0.post_attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48], bf16[T, 48]
    weights, ids = reference.router(h_1, W("model.layers.0.block_sparse_moe.gate.weight", bf16[8, 48]), None, None, top_k=2, renormalize=True)    # fp32[T, 2], i64[T, 2]
    grouped, order, ends = reference.group(h_1, ids, experts=8)    # bf16[2*T, 48], i64[2*T], i64[8]
    gate_up = cpp.grouped_linear(grouped, shuffle(stack(cat([W("model.layers.0.block_sparse_moe.experts.{expert}.w1.weight", bf16[80, 48]), W("model.layers.0.block_sparse_moe.experts.{expert}.w3.weight", bf16[80, 48])]), 0, 8), "blocks"), ends, None)    # bf16[2*T, 160]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[2*T, 80]
    down = torch.grouped_linear(m, shuffle(stack(W("model.layers.0.block_sparse_moe.experts.{expert}.w2.weight", bf16[48, 80]), 0, 8), "onednn"), ends, None)    # bf16[2*T, 48]; cpp: 48 rows are no block
    y = torch.combine(down, weights, order)    # bf16[T, 48]
    h_2, x_2 = torch.add_rms_norm(x_1, y, W("model.layers.1.input_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48], bf16[T, 48]
    qkv_1 = cpp.linear(h_2, shuffle(cat([W("model.layers.1.self_attn.q_proj.weight", bf16[48, 48]), W("model.layers.1.self_attn.k_proj.weight", bf16[24, 48]), W("model.layers.1.self_attn.v_proj.weight", bf16[24, 48])]), "blocks"))    # bf16[T, 96]
    q_3, k_3, v_2 = reference.split(qkv_1, sizes=[48, 24, 24])    # bf16[T, 48], bf16[T, 24], bf16[T, 24]
    q_4 = reference.split_heads(q_3, heads=4)    # bf16[T, 4, 12]
    k_4 = reference.split_heads(k_3, heads=2)    # bf16[T, 2, 12]
    v_3 = reference.split_heads(v_2, heads=2)    # bf16[T, 2, 12]
    q_5 = cpp.norm_rope_write(q_4, k_4, v_3, cos, sin, None, None, KV("model.layers.1", bf16[2, 2, 12]), batch)    # bf16[T, 4, 12]
    a_2 = cpp.paged_attention(q_5, KV("model.layers.1", bf16[2, 2, 12]), batch, scale=0.28867513459481287)    # bf16[T, 4, 12]
    return x_2, a_2

def head(x_2: bf16[R, 48], a_2: bf16[R, 4, 12]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 48]
    o_1 = torch.linear(a_3, shuffle(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 48]), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    h_3, x_3 = torch.add_rms_norm(x_2, o_1, W("model.layers.1.post_attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48], bf16[R, 48]
    weights_1, ids_1 = reference.router(h_3, W("model.layers.1.block_sparse_moe.gate.weight", bf16[8, 48]), None, None, top_k=2, renormalize=True)    # fp32[R, 2], i64[R, 2]
    grouped, order, ends = reference.group(h_3, ids_1, experts=8)    # bf16[2*R, 48], i64[2*R], i64[8]
    gate_up = cpp.grouped_linear(grouped, shuffle(stack(cat([W("model.layers.1.block_sparse_moe.experts.{expert}.w1.weight", bf16[80, 48]), W("model.layers.1.block_sparse_moe.experts.{expert}.w3.weight", bf16[80, 48])]), 0, 8), "blocks"), ends, None)    # bf16[2*R, 160]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[2*R, 80]
    down = torch.grouped_linear(m, shuffle(stack(W("model.layers.1.block_sparse_moe.experts.{expert}.w2.weight", bf16[48, 80]), 0, 8), "onednn"), ends, None)    # bf16[2*R, 48]; cpp: 48 rows are no block
    y_1 = torch.combine(down, weights_1, order)    # bf16[R, 48]
    hidden, x_4 = torch.add_rms_norm(x_3, y_1, W("model.norm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48], bf16[R, 48]
    logits = cpp.linear(hidden, shuffle(W("lm_head.weight", bf16[101, 48]), "blocks"))    # bf16[R, 101]
    return logits
