def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(64, 100000.0))    # fp32[T, 32], fp32[T, 32]
    x = cpp.embedding(tokens, shuffle(W("model.embed_tokens.weight", bf16[49152, 576], fmt="q8_0"), "panels"))    # bf16[T, 576]
    h = torch.rms_norm(x, W("model.layers.0.input_layernorm.weight", bf16[576]), eps=1e-05)    # bf16[T, 576]
    qkv = cpp.linear(h, shuffle(cat([W("model.layers.0.self_attn.q_proj.weight", bf16[576, 576], fmt="q4_1"), W("model.layers.0.self_attn.k_proj.weight", bf16[192, 576], fmt="q4_1"), W("model.layers.0.self_attn.v_proj.weight", bf16[192, 576], fmt="q4_1")]), "panels"))    # bf16[T, 960]; torch: its weight is stored as q4_1
    q, k, v = reference.split(qkv, sizes=[576, 192, 192])    # bf16[T, 576], bf16[T, 192], bf16[T, 192]
    q_1 = reference.split_heads(q, heads=9)    # bf16[T, 9, 64]
    k_1 = reference.split_heads(k, heads=3)    # bf16[T, 3, 64]
    v_1 = reference.split_heads(v, heads=3)    # bf16[T, 3, 64]
    q_2 = torch.norm_rope_write(q_1, k_1, v_1, cos, sin, None, None, KV("model.layers.0", bf16[2, 3, 64]), batch)    # bf16[T, 9, 64]
    a = torch.paged_attention(q_2, KV("model.layers.0", bf16[2, 3, 64]), batch, scale=0.125)    # bf16[T, 9, 64]
    a_1 = reference.merge_heads(a)    # bf16[T, 576]
    o = cpp.linear(a_1, shuffle(W("model.layers.0.self_attn.o_proj.weight", bf16[576, 576], fmt="q4_1"), "panels"))    # bf16[T, 576]; torch: its weight is stored as q4_1
    h_1, x_1 = torch.add_rms_norm(x, o, W("model.layers.0.post_attention_layernorm.weight", bf16[576]), eps=1e-05)    # bf16[T, 576], bf16[T, 576]
    gate_up = cpp.linear(h_1, shuffle(cat([W("model.layers.0.mlp.gate_proj.weight", bf16[1536, 576], fmt="q4_1"), W("model.layers.0.mlp.up_proj.weight", bf16[1536, 576], fmt="q4_1")]), "panels"))    # bf16[T, 3072]; torch: its weight is stored as q4_1
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[T, 1536]
    down = cpp.linear(m, shuffle(W("model.layers.0.mlp.down_proj.weight", bf16[576, 1536], fmt="q4_1"), "panels"))    # bf16[T, 576]; torch: its weight is stored as q4_1
    h_2, x_2 = torch.add_rms_norm(x_1, down, W("model.layers.1.input_layernorm.weight", bf16[576]), eps=1e-05)    # bf16[T, 576], bf16[T, 576]
    qkv_1 = cpp.linear(h_2, shuffle(cat([W("model.layers.1.self_attn.q_proj.weight", bf16[576, 576], fmt="q4_1"), W("model.layers.1.self_attn.k_proj.weight", bf16[192, 576], fmt="q4_1"), W("model.layers.1.self_attn.v_proj.weight", bf16[192, 576], fmt="q4_1")]), "panels"))    # bf16[T, 960]; torch: its weight is stored as q4_1
    q_3, k_3, v_2 = reference.split(qkv_1, sizes=[576, 192, 192])    # bf16[T, 576], bf16[T, 192], bf16[T, 192]
    q_4 = reference.split_heads(q_3, heads=9)    # bf16[T, 9, 64]
    k_4 = reference.split_heads(k_3, heads=3)    # bf16[T, 3, 64]
    v_3 = reference.split_heads(v_2, heads=3)    # bf16[T, 3, 64]
    q_5 = torch.norm_rope_write(q_4, k_4, v_3, cos, sin, None, None, KV("model.layers.1", bf16[2, 3, 64]), batch)    # bf16[T, 9, 64]
    a_2 = torch.paged_attention(q_5, KV("model.layers.1", bf16[2, 3, 64]), batch, scale=0.125)    # bf16[T, 9, 64]
    return x_2, a_2

def head(x_2: bf16[R, 576], a_2: bf16[R, 9, 64]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 576]
    o_1 = cpp.linear(a_3, shuffle(W("model.layers.1.self_attn.o_proj.weight", bf16[576, 576], fmt="q4_1"), "panels"))    # bf16[R, 576]; torch: its weight is stored as q4_1
    h_3, x_3 = torch.add_rms_norm(x_2, o_1, W("model.layers.1.post_attention_layernorm.weight", bf16[576]), eps=1e-05)    # bf16[R, 576], bf16[R, 576]
    gate_up = cpp.linear(h_3, shuffle(cat([W("model.layers.1.mlp.gate_proj.weight", bf16[1536, 576], fmt="q4_1"), W("model.layers.1.mlp.up_proj.weight", bf16[1536, 576], fmt="q4_1")]), "panels"))    # bf16[R, 3072]; torch: its weight is stored as q4_1
    m_1 = reference.gated_activate(gate_up, kind="silu")    # bf16[R, 1536]
    down_1 = cpp.linear(m_1, shuffle(W("model.layers.1.mlp.down_proj.weight", bf16[576, 1536], fmt="q4_1"), "panels"))    # bf16[R, 576]; torch: its weight is stored as q4_1
    hidden, x_4 = torch.add_rms_norm(x_3, down_1, W("model.norm.weight", bf16[576]), eps=1e-05)    # bf16[R, 576], bf16[R, 576]
    logits = cpp.linear(hidden, shuffle(W("model.embed_tokens.weight", bf16[49152, 576], fmt="q8_0"), "panels"))    # bf16[R, 49152]; torch: its weight is stored as q8_0
    return logits
