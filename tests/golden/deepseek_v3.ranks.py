def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(8, 10000.0, kind="yarn", factor=4.0, original_max_position=32), scale=1.0126366731955934)    # fp32[T, 4], fp32[T, 4]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    h = torch.rms_norm(x, W("model.layers.0.input_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48]
    qkv_a = torch.linear(h, shuffle(cat([W("model.layers.0.self_attn.q_a_proj.weight", bf16[20, 48]), W("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", bf16[26, 48])]), "onednn"))    # bf16[T, 46]; cpp: 46 rows are no block
    q_a, kv_a = reference.split(qkv_a, sizes=[20, 26])    # bf16[T, 20], bf16[T, 26]
    q_a_1 = torch.rms_norm(q_a, W("model.layers.0.self_attn.q_a_layernorm.weight", bf16[20]), eps=1e-06)    # bf16[T, 20]
    q_b = torch.linear(q_a_1, shuffle(share(W("model.layers.0.self_attn.q_b_proj.weight", bf16[80, 20]), "tensor", 2), "onednn"))    # bf16[T, 40]; cpp: 40 rows are no block
    q = reference.split_heads(q_b, heads=2)    # bf16[T, 2, 20]
    q_1, q_rope = reference.split(q, sizes=[12, 8])    # bf16[T, 2, 12], bf16[T, 2, 8]
    latent, k_rope = reference.split(kv_a, sizes=[18, 8])    # bf16[T, 18], bf16[T, 8]
    k_rope_1 = reference.split_heads(k_rope, heads=1)    # bf16[T, 1, 8]
    q_rope_1 = torch.norm_rope_write_latent(q_rope, latent, k_rope_1, cos, sin, W("model.layers.0.self_attn.kv_a_layernorm.weight", bf16[18]), KV("model.layers.0", bf16[26]), batch, interleaved=True, eps=1e-06)    # bf16[T, 2, 8]
    a = torch.paged_mla_attention(q_1, q_rope_1, share(W("model.layers.0.self_attn.kv_b_proj.weight", bf16[88, 18]), "tensor", 2), KV("model.layers.0", bf16[26]), batch, scale=0.2691103539202878)    # bf16[T, 2, 10]
    a_1 = reference.merge_heads(a)    # bf16[T, 20]
    o_partial = torch.linear(a_1, shuffle(share(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 40]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    o = gloo.all_reduce(o_partial, axis="tensor")    # bf16[T, 48]
    h_1, x_1 = torch.add_rms_norm(x, o, W("model.layers.0.post_attention_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    gate_up = cpp.linear(h_1, shuffle(cat([share(W("model.layers.0.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.0.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 80]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[T, 40]
    down_partial = torch.linear(m, shuffle(share(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    down = gloo.all_reduce(down_partial, axis="tensor")    # bf16[T, 48]
    h_2, x_2 = torch.add_rms_norm(x_1, down, W("model.layers.1.input_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    qkv_a_1 = torch.linear(h_2, shuffle(cat([W("model.layers.1.self_attn.q_a_proj.weight", bf16[20, 48]), W("model.layers.1.self_attn.kv_a_proj_with_mqa.weight", bf16[26, 48])]), "onednn"))    # bf16[T, 46]; cpp: 46 rows are no block
    q_a_2, kv_a_1 = reference.split(qkv_a_1, sizes=[20, 26])    # bf16[T, 20], bf16[T, 26]
    q_a_3 = torch.rms_norm(q_a_2, W("model.layers.1.self_attn.q_a_layernorm.weight", bf16[20]), eps=1e-06)    # bf16[T, 20]
    q_b_1 = torch.linear(q_a_3, shuffle(share(W("model.layers.1.self_attn.q_b_proj.weight", bf16[80, 20]), "tensor", 2), "onednn"))    # bf16[T, 40]; cpp: 40 rows are no block
    q_2 = reference.split_heads(q_b_1, heads=2)    # bf16[T, 2, 20]
    q_3, q_rope_2 = reference.split(q_2, sizes=[12, 8])    # bf16[T, 2, 12], bf16[T, 2, 8]
    latent_2, k_rope_3 = reference.split(kv_a_1, sizes=[18, 8])    # bf16[T, 18], bf16[T, 8]
    k_rope_4 = reference.split_heads(k_rope_3, heads=1)    # bf16[T, 1, 8]
    q_rope_3 = torch.norm_rope_write_latent(q_rope_2, latent_2, k_rope_4, cos, sin, W("model.layers.1.self_attn.kv_a_layernorm.weight", bf16[18]), KV("model.layers.1", bf16[26]), batch, interleaved=True, eps=1e-06)    # bf16[T, 2, 8]
    a_2 = torch.paged_mla_attention(q_3, q_rope_3, share(W("model.layers.1.self_attn.kv_b_proj.weight", bf16[88, 18]), "tensor", 2), KV("model.layers.1", bf16[26]), batch, scale=0.2691103539202878)    # bf16[T, 2, 10]
    return x_2, a_2

def head(x_2: bf16[R, 48], a_2: bf16[R, 2, 10]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 20]
    o_1_partial = torch.linear(a_3, shuffle(share(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 40]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    o_1 = gloo.all_reduce(o_1_partial, axis="tensor")    # bf16[R, 48]
    h_3, x_3 = torch.add_rms_norm(x_2, o_1, W("model.layers.1.post_attention_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    weights, ids = reference.router(h_3, W("model.layers.1.mlp.gate.weight", bf16[16, 48]), None, W("model.layers.1.mlp.gate.e_score_correction_bias", fp32[16]), top_k=4, method="noaux_tc", score="sigmoid", groups=4, top_groups=2, renormalize=True, scale=2.5)    # fp32[R, 4], i64[R, 4]
    rows, row_weights, row_ids = gloo.gather_tokens(h_3, weights, ids, axis="data", ranks=2)    # bf16[2*R, 48], fp32[2*R, 4], i64[2*R, 4]
    grouped, order, ends = reference.group(rows, row_ids, offset("experts", 2, 8), experts=8)    # bf16[8*R, 48], i64[8*R], i64[8]
    gate_up_1 = torch.grouped_linear(grouped, shuffle(share(cat([share(stack(W("model.layers.1.mlp.experts.{expert}.gate_proj.weight", bf16[24, 48]), 0, 16), "width", 2, dim=1), share(stack(W("model.layers.1.mlp.experts.{expert}.up_proj.weight", bf16[24, 48]), 0, 16), "width", 2, dim=1)], dim=1), "experts", 2), "onednn"), ends, None)    # bf16[8*R, 24]; cpp: 24 rows are no block
    m = reference.gated_activate(gate_up_1, kind="silu")    # bf16[8*R, 12]
    down = torch.grouped_linear(m, shuffle(share(share(stack(W("model.layers.1.mlp.experts.{expert}.down_proj.weight", bf16[48, 24]), 0, 16), "width", 2, dim=2), "experts", 2), "onednn"), ends, None)    # bf16[8*R, 48]; cpp: 48 rows are no block
    y = torch.combine(down, row_weights, order)    # bf16[2*R, 48]
    y_partial = gloo.reduce_scatter(y, axis="data", ranks=2)    # bf16[R, 48]
    gate_up = torch.linear(h_3, shuffle(cat([share(W("model.layers.1.mlp.shared_experts.gate_proj.weight", bf16[24, 48]), "tensor", 2), share(W("model.layers.1.mlp.shared_experts.up_proj.weight", bf16[24, 48]), "tensor", 2)]), "onednn"))    # bf16[R, 24]; cpp: 24 rows are no block
    m_1 = reference.gated_activate(gate_up, kind="silu")    # bf16[R, 12]
    shared_down_partial = torch.linear(m_1, shuffle(share(W("model.layers.1.mlp.shared_experts.down_proj.weight", bf16[48, 24]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    y_1_partial = reference.add(y_partial, shared_down_partial)    # bf16[R, 48]
    y_1 = gloo.all_reduce(y_1_partial, axis="tensor")    # bf16[R, 48]
    hidden, x_4 = torch.add_rms_norm(x_3, y_1, W("model.norm.weight", bf16[48]), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    logits_1 = torch.linear(hidden, shuffle(share(W("lm_head.weight", bf16[101, 48]), "tensor", 2), "onednn"))    # bf16[R, 51]; cpp: 51 rows are no block
    logits = gloo.all_gather(logits_1, axis="tensor", size=101)    # bf16[R, 101]
    return logits
