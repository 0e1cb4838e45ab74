def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(12, 10000.0))    # fp32[T, 6], fp32[T, 6]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    h = torch.rms_norm(x, W("model.layers.0.input_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48]
    qkv = torch.linear(h, shuffle(cat([share(W("model.layers.0.self_attn.q_proj.weight", bf16[48, 48]), "tensor", 2), share(W("model.layers.0.self_attn.k_proj.weight", bf16[24, 48]), "tensor", 2), share(W("model.layers.0.self_attn.v_proj.weight", bf16[24, 48]), "tensor", 2)]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    q, k, v = reference.split(qkv, sizes=[24, 12, 12])    # bf16[T, 24], bf16[T, 12], bf16[T, 12]
    q_1 = reference.split_heads(q, heads=2)    # bf16[T, 2, 12]
    k_1 = reference.split_heads(k, heads=1)    # bf16[T, 1, 12]
    v_1 = reference.split_heads(v, heads=1)    # bf16[T, 1, 12]
    q_2 = cpp.norm_rope_write(q_1, k_1, v_1, cos, sin, None, None, KV("model.layers.0", bf16[2, 1, 12]), batch)    # bf16[T, 2, 12]
    a = cpp.paged_attention(q_2, KV("model.layers.0", bf16[2, 1, 12]), batch, scale=0.28867513459481287)    # bf16[T, 2, 12]
    a_1 = reference.merge_heads(a)    # bf16[T, 24]
    o_partial = torch.linear(a_1, shuffle(share(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 48]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    o = gloo.all_reduce(o_partial, axis="tensor")    # bf16[T, 48]
    h_1, x_1 = torch.add_rms_norm(x, o, W("model.layers.0.post_attention_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    gate_up = cpp.linear(h_1, shuffle(cat([share(W("model.layers.0.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.0.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 80]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[T, 40]
    down_partial = torch.linear(m, shuffle(share(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    down = gloo.all_reduce(down_partial, axis="tensor")    # bf16[T, 48]
    h_2, x_2 = torch.add_rms_norm(x_1, down, W("model.layers.1.input_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    qkv_1 = torch.linear(h_2, shuffle(cat([share(W("model.layers.1.self_attn.q_proj.weight", bf16[48, 48]), "tensor", 2), share(W("model.layers.1.self_attn.k_proj.weight", bf16[24, 48]), "tensor", 2), share(W("model.layers.1.self_attn.v_proj.weight", bf16[24, 48]), "tensor", 2)]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    q_3, k_3, v_2 = reference.split(qkv_1, sizes=[24, 12, 12])    # bf16[T, 24], bf16[T, 12], bf16[T, 12]
    q_4 = reference.split_heads(q_3, heads=2)    # bf16[T, 2, 12]
    k_4 = reference.split_heads(k_3, heads=1)    # bf16[T, 1, 12]
    v_3 = reference.split_heads(v_2, heads=1)    # bf16[T, 1, 12]
    q_5 = cpp.norm_rope_write(q_4, k_4, v_3, cos, sin, None, None, KV("model.layers.1", bf16[2, 1, 12]), batch)    # bf16[T, 2, 12]
    a_2 = cpp.paged_attention(q_5, KV("model.layers.1", bf16[2, 1, 12]), batch, scale=0.28867513459481287)    # bf16[T, 2, 12]
    return x_2, a_2

def head(x_2: bf16[R, 48], a_2: bf16[R, 2, 12]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 24]
    o_1_partial = torch.linear(a_3, shuffle(share(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 48]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    o_1 = gloo.all_reduce(o_1_partial, axis="tensor")    # bf16[R, 48]
    h_3, x_3 = torch.add_rms_norm(x_2, o_1, W("model.layers.1.post_attention_layernorm.weight", bf16[48]), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    gate_up = cpp.linear(h_3, shuffle(cat([share(W("model.layers.1.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.1.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[R, 80]
    m_1 = reference.gated_activate(gate_up, kind="silu")    # bf16[R, 40]
    down_1_partial = torch.linear(m_1, shuffle(share(W("model.layers.1.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    down_1 = gloo.all_reduce(down_1_partial, axis="tensor")    # bf16[R, 48]
    hidden, x_4 = torch.add_rms_norm(x_3, down_1, W("model.norm.weight", bf16[48]), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    logits_1 = torch.linear(hidden, shuffle(share(W("lm_head.weight", bf16[101, 48]), "tensor", 2), "onednn"))    # bf16[R, 51]; cpp: 51 rows are no block
    logits = gloo.all_gather(logits_1, axis="tensor", size=101)    # bf16[R, 101]
    return logits
