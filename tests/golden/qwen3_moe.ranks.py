def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(16, 10000.0))    # fp32[T, 8], fp32[T, 8]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    h = torch.rms_norm(x, W("model.layers.0.input_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48]
    qkv = torch.linear(h, shuffle(cat([share(W("model.layers.0.self_attn.q_proj.weight", bf16[64, 48]), "tensor", 4), share(W("model.layers.0.self_attn.k_proj.weight", bf16[32, 48]), "tensor", 4, copies=2), share(W("model.layers.0.self_attn.v_proj.weight", bf16[32, 48]), "tensor", 4, copies=2)]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    q, k, v = reference.split(qkv, sizes=[16, 16, 16])    # bf16[T, 16], bf16[T, 16], bf16[T, 16]
    q_1 = reference.split_heads(q, heads=1)    # bf16[T, 1, 16]
    k_1 = reference.split_heads(k, heads=1)    # bf16[T, 1, 16]
    v_1 = reference.split_heads(v, heads=1)    # bf16[T, 1, 16]
    q_3 = cpp.norm_rope_write(q_1, k_1, v_1, cos, sin, W("model.layers.0.self_attn.q_norm.weight", bf16[16]), W("model.layers.0.self_attn.k_norm.weight", bf16[16]), KV("model.layers.0", bf16[2, 1, 16]), batch, eps=1e-06)    # bf16[T, 1, 16]
    a = cpp.paged_attention(q_3, KV("model.layers.0", bf16[2, 1, 16]), batch, scale=0.25)    # bf16[T, 1, 16]
    a_1 = reference.merge_heads(a)    # bf16[T, 16]
    o_partial = torch.linear(a_1, shuffle(share(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 64]), "tensor", 4, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    o = gloo.all_reduce(o_partial, axis="tensor")    # bf16[T, 48]
    h_1, x_1 = torch.add_rms_norm(x, o, W("model.layers.0.post_attention_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    weights, ids = reference.router(h_1, W("model.layers.0.mlp.gate.weight", bf16[16, 48]), None, None, top_k=4, renormalize=True)    # fp32[T, 4], i64[T, 4]
    grouped, order, ends = reference.group(h_1, ids, offset("experts", 4, 4), experts=4)    # bf16[4*T, 48], i64[4*T], i64[4]
    gate_up = torch.grouped_linear(grouped, shuffle(share(stack(cat([W("model.layers.0.mlp.experts.{expert}.gate_proj.weight", bf16[24, 48]), W("model.layers.0.mlp.experts.{expert}.up_proj.weight", bf16[24, 48])]), 0, 16), "experts", 4), "onednn"), ends, None)    # bf16[4*T, 48]; cpp: 48 rows are no block
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[4*T, 24]
    down = torch.grouped_linear(m, shuffle(share(stack(W("model.layers.0.mlp.experts.{expert}.down_proj.weight", bf16[48, 24]), 0, 16), "experts", 4), "onednn"), ends, None)    # bf16[4*T, 48]; cpp: 48 rows are no block
    y_partial = torch.combine(down, weights, order)    # bf16[T, 48]
    y = gloo.all_reduce(y_partial, axis="tensor")    # bf16[T, 48]
    h_2, x_2 = torch.add_rms_norm(x_1, y, W("model.layers.1.input_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    qkv_1 = torch.linear(h_2, shuffle(cat([share(W("model.layers.1.self_attn.q_proj.weight", bf16[64, 48]), "tensor", 4), share(W("model.layers.1.self_attn.k_proj.weight", bf16[32, 48]), "tensor", 4, copies=2), share(W("model.layers.1.self_attn.v_proj.weight", bf16[32, 48]), "tensor", 4, copies=2)]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    q_4, k_4, v_2 = reference.split(qkv_1, sizes=[16, 16, 16])    # bf16[T, 16], bf16[T, 16], bf16[T, 16]
    q_5 = reference.split_heads(q_4, heads=1)    # bf16[T, 1, 16]
    k_5 = reference.split_heads(k_4, heads=1)    # bf16[T, 1, 16]
    v_3 = reference.split_heads(v_2, heads=1)    # bf16[T, 1, 16]
    q_7 = cpp.norm_rope_write(q_5, k_5, v_3, cos, sin, W("model.layers.1.self_attn.q_norm.weight", bf16[16]), W("model.layers.1.self_attn.k_norm.weight", bf16[16]), KV("model.layers.1", bf16[2, 1, 16]), batch, eps=1e-06)    # bf16[T, 1, 16]
    a_2 = cpp.paged_attention(q_7, KV("model.layers.1", bf16[2, 1, 16]), batch, scale=0.25)    # bf16[T, 1, 16]
    return x_2, a_2

def head(x_2: bf16[R, 48], a_2: bf16[R, 1, 16]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 16]
    o_1_partial = torch.linear(a_3, shuffle(share(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 64]), "tensor", 4, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    o_1 = gloo.all_reduce(o_1_partial, axis="tensor")    # bf16[R, 48]
    h_3, x_3 = torch.add_rms_norm(x_2, o_1, W("model.layers.1.post_attention_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    weights_1, ids_1 = reference.router(h_3, W("model.layers.1.mlp.gate.weight", bf16[16, 48]), None, None, top_k=4, renormalize=True)    # fp32[R, 4], i64[R, 4]
    grouped, order, ends = reference.group(h_3, ids_1, offset("experts", 4, 4), experts=4)    # bf16[4*R, 48], i64[4*R], i64[4]
    gate_up = torch.grouped_linear(grouped, shuffle(share(stack(cat([W("model.layers.1.mlp.experts.{expert}.gate_proj.weight", bf16[24, 48]), W("model.layers.1.mlp.experts.{expert}.up_proj.weight", bf16[24, 48])]), 0, 16), "experts", 4), "onednn"), ends, None)    # bf16[4*R, 48]; cpp: 48 rows are no block
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[4*R, 24]
    down = torch.grouped_linear(m, shuffle(share(stack(W("model.layers.1.mlp.experts.{expert}.down_proj.weight", bf16[48, 24]), 0, 16), "experts", 4), "onednn"), ends, None)    # bf16[4*R, 48]; cpp: 48 rows are no block
    y_1_partial = torch.combine(down, weights_1, order)    # bf16[R, 48]
    y_1 = gloo.all_reduce(y_1_partial, axis="tensor")    # bf16[R, 48]
    hidden, x_4 = torch.add_rms_norm(x_3, y_1, W("model.norm.weight", bf16[48]), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    logits_1 = torch.linear(hidden, shuffle(share(W("lm_head.weight", bf16[101, 48]), "tensor", 4), "onednn"))    # bf16[R, 26]; cpp: 26 rows are no block
    logits = gloo.all_gather(logits_1, axis="tensor", size=101)    # bf16[R, 101]
    return logits
