def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(12, 10000.0))    # fp32[T, 6], fp32[T, 6]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    q = torch.linear(x, shuffle(share(W("model.layers.0.self_attn.q_proj.weight", bf16[48, 48]), "tensor", 2), "onednn"))    # bf16[T, 24]; cpp: 24 rows are no block
    k_v = torch.linear(x, shuffle(cat([share(W("model.layers.0.self_attn.k_proj.weight", bf16[24, 48]), "tensor", 2), share(W("model.layers.0.self_attn.v_proj.weight", bf16[24, 48]), "tensor", 2)]), "onednn"))    # bf16[T, 24]; cpp: 24 rows are no block
    k, v = reference.split(k_v, sizes=[12, 12])    # bf16[T, 12], bf16[T, 12]
    squares = reference.sum_squares(q)    # fp32[T, 1]
    squares_1 = gloo.all_reduce(squares, axis="tensor")    # fp32[T, 1]
    q_1 = reference.scale_by_rms(q, squares_1, share(W("model.layers.0.self_attn.q_norm.weight", bf16[48]), "tensor", 2), eps=1e-05, columns=48)    # bf16[T, 24]
    squares_2 = reference.sum_squares(k)    # fp32[T, 1]
    squares_3 = gloo.all_reduce(squares_2, axis="tensor")    # fp32[T, 1]
    k_1 = reference.scale_by_rms(k, squares_3, share(W("model.layers.0.self_attn.k_norm.weight", bf16[24]), "tensor", 2), eps=1e-05, columns=24)    # bf16[T, 12]
    q_2 = reference.split_heads(q_1, heads=2)    # bf16[T, 2, 12]
    k_2 = reference.split_heads(k_1, heads=1)    # bf16[T, 1, 12]
    v_1 = reference.split_heads(v, heads=1)    # bf16[T, 1, 12]
    q_3 = cpp.norm_rope_write(q_2, k_2, v_1, cos, sin, None, None, KV("model.layers.0", bf16[2, 1, 12]), batch)    # bf16[T, 2, 12]
    a = cpp.paged_attention(q_3, KV("model.layers.0", bf16[2, 1, 12]), batch, scale=0.28867513459481287)    # bf16[T, 2, 12]
    a_1 = reference.merge_heads(a)    # bf16[T, 24]
    o_partial = torch.linear(a_1, shuffle(share(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 48]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    o = gloo.all_reduce(o_partial, axis="tensor")    # bf16[T, 48]
    a_2 = torch.rms_norm(o, W("model.layers.0.post_attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    x_1 = reference.add(x, a_2)    # bf16[T, 48]
    gate_up = cpp.linear(x_1, shuffle(cat([share(W("model.layers.0.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.0.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 80]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[T, 40]
    down_partial = torch.linear(m, shuffle(share(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    down = gloo.all_reduce(down_partial, axis="tensor")    # bf16[T, 48]
    m_1 = torch.rms_norm(down, W("model.layers.0.post_feedforward_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    x_2 = reference.add(x_1, m_1)    # bf16[T, 48]
    q_4 = torch.linear(x_2, shuffle(share(W("model.layers.1.self_attn.q_proj.weight", bf16[48, 48]), "tensor", 2), "onednn"))    # bf16[T, 24]; cpp: 24 rows are no block
    k_v_1 = torch.linear(x_2, shuffle(cat([share(W("model.layers.1.self_attn.k_proj.weight", bf16[24, 48]), "tensor", 2), share(W("model.layers.1.self_attn.v_proj.weight", bf16[24, 48]), "tensor", 2)]), "onednn"))    # bf16[T, 24]; cpp: 24 rows are no block
    k_4, v_2 = reference.split(k_v_1, sizes=[12, 12])    # bf16[T, 12], bf16[T, 12]
    squares_4 = reference.sum_squares(q_4)    # fp32[T, 1]
    squares_5 = gloo.all_reduce(squares_4, axis="tensor")    # fp32[T, 1]
    q_5 = reference.scale_by_rms(q_4, squares_5, share(W("model.layers.1.self_attn.q_norm.weight", bf16[48]), "tensor", 2), eps=1e-05, columns=48)    # bf16[T, 24]
    squares_6 = reference.sum_squares(k_4)    # fp32[T, 1]
    squares_7 = gloo.all_reduce(squares_6, axis="tensor")    # fp32[T, 1]
    k_5 = reference.scale_by_rms(k_4, squares_7, share(W("model.layers.1.self_attn.k_norm.weight", bf16[24]), "tensor", 2), eps=1e-05, columns=24)    # bf16[T, 12]
    q_6 = reference.split_heads(q_5, heads=2)    # bf16[T, 2, 12]
    k_6 = reference.split_heads(k_5, heads=1)    # bf16[T, 1, 12]
    v_3 = reference.split_heads(v_2, heads=1)    # bf16[T, 1, 12]
    q_7 = cpp.norm_rope_write(q_6, k_6, v_3, cos, sin, None, None, KV("model.layers.1", bf16[2, 1, 12]), batch)    # bf16[T, 2, 12]
    a_3 = cpp.paged_attention(q_7, KV("model.layers.1", bf16[2, 1, 12]), batch, scale=0.28867513459481287)    # bf16[T, 2, 12]
    return x_2, a_3

def head(x_2: bf16[R, 48], a_3: bf16[R, 2, 12]):
    a_4 = reference.merge_heads(a_3)    # bf16[R, 24]
    o_1_partial = torch.linear(a_4, shuffle(share(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 48]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    o_1 = gloo.all_reduce(o_1_partial, axis="tensor")    # bf16[R, 48]
    a_5 = torch.rms_norm(o_1, W("model.layers.1.post_attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48]
    x_3 = reference.add(x_2, a_5)    # bf16[R, 48]
    gate_up = cpp.linear(x_3, shuffle(cat([share(W("model.layers.1.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.1.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[R, 80]
    m_2 = reference.gated_activate(gate_up, kind="silu")    # bf16[R, 40]
    down_1_partial = torch.linear(m_2, shuffle(share(W("model.layers.1.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    down_1 = gloo.all_reduce(down_1_partial, axis="tensor")    # bf16[R, 48]
    m_3 = torch.rms_norm(down_1, W("model.layers.1.post_feedforward_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48]
    hidden, x_4 = torch.add_rms_norm(x_3, m_3, W("model.norm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48], bf16[R, 48]
    logits_1 = torch.linear(hidden, shuffle(share(W("lm_head.weight", bf16[101, 48]), "tensor", 2), "onednn"))    # bf16[R, 51]; cpp: 51 rows are no block
    logits = gloo.all_gather(logits_1, axis="tensor", size=101)    # bf16[R, 101]
    return logits
