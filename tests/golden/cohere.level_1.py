def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(12, 500000.0))    # fp32[T, 6], fp32[T, 6]
    x = cpp.embedding(tokens, shuffle(W("model.embed_tokens.weight", bf16[101, 48]), "blocks"))    # bf16[T, 48]
    h = reference.layer_norm(x, W("model.layers.0.input_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    qkv = cpp.linear(h, shuffle(cat([W("model.layers.0.self_attn.q_proj.weight", bf16[48, 48]), W("model.layers.0.self_attn.k_proj.weight", bf16[24, 48]), W("model.layers.0.self_attn.v_proj.weight", bf16[24, 48])]), "blocks"))    # bf16[T, 96]
    q, k, v = reference.split(qkv, sizes=[48, 24, 24])    # bf16[T, 48], bf16[T, 24], bf16[T, 24]
    q_1 = reference.split_heads(q, heads=4)    # bf16[T, 4, 12]
    k_1 = reference.split_heads(k, heads=2)    # bf16[T, 2, 12]
    v_1 = reference.split_heads(v, heads=2)    # bf16[T, 2, 12]
    q_2 = cpp.norm_rope_write(q_1, k_1, v_1, cos, sin, None, None, KV("model.layers.0", bf16[2, 2, 12]), batch, interleaved=True)    # bf16[T, 4, 12]
    a = cpp.paged_attention(q_2, KV("model.layers.0", bf16[2, 2, 12]), batch, scale=0.28867513459481287)    # bf16[T, 4, 12]
    a_1 = reference.merge_heads(a)    # bf16[T, 48]
    o = torch.linear(a_1, shuffle(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 48]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    gate_up = cpp.linear(h, shuffle(cat([W("model.layers.0.mlp.gate_proj.weight", bf16[80, 48]), W("model.layers.0.mlp.up_proj.weight", bf16[80, 48])]), "blocks"))    # bf16[T, 160]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[T, 80]
    down = torch.linear(m, shuffle(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    o_1 = reference.add(o, down)    # bf16[T, 48]
    x_1 = reference.add(x, o_1)    # bf16[T, 48]
    h_1 = reference.layer_norm(x_1, W("model.layers.1.input_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    qkv_1 = cpp.linear(h_1, shuffle(cat([W("model.layers.1.self_attn.q_proj.weight", bf16[48, 48]), W("model.layers.1.self_attn.k_proj.weight", bf16[24, 48]), W("model.layers.1.self_attn.v_proj.weight", bf16[24, 48])]), "blocks"))    # bf16[T, 96]
    q_3, k_3, v_2 = reference.split(qkv_1, sizes=[48, 24, 24])    # bf16[T, 48], bf16[T, 24], bf16[T, 24]
    q_4 = reference.split_heads(q_3, heads=4)    # bf16[T, 4, 12]
    k_4 = reference.split_heads(k_3, heads=2)    # bf16[T, 2, 12]
    v_3 = reference.split_heads(v_2, heads=2)    # bf16[T, 2, 12]
    q_5 = cpp.norm_rope_write(q_4, k_4, v_3, cos, sin, None, None, KV("model.layers.1", bf16[2, 2, 12]), batch, interleaved=True)    # bf16[T, 4, 12]
    a_2 = cpp.paged_attention(q_5, KV("model.layers.1", bf16[2, 2, 12]), batch, scale=0.28867513459481287)    # bf16[T, 4, 12]
    return x_1, h_1, a_2

def head(x_1: bf16[R, 48], h_1: bf16[R, 48], a_2: bf16[R, 4, 12]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 48]
    o_2 = torch.linear(a_3, shuffle(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 48]), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    gate_up = cpp.linear(h_1, shuffle(cat([W("model.layers.1.mlp.gate_proj.weight", bf16[80, 48]), W("model.layers.1.mlp.up_proj.weight", bf16[80, 48])]), "blocks"))    # bf16[R, 160]
    m_1 = reference.gated_activate(gate_up, kind="silu")    # bf16[R, 80]
    down_1 = torch.linear(m_1, shuffle(W("model.layers.1.mlp.down_proj.weight", bf16[48, 80]), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    o_3 = reference.add(o_2, down_1)    # bf16[R, 48]
    x_2 = reference.add(x_1, o_3)    # bf16[R, 48]
    hidden = reference.layer_norm(x_2, W("model.norm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48]
    logits = cpp.linear(hidden, shuffle(W("model.embed_tokens.weight", bf16[101, 48]), "blocks"))    # bf16[R, 101]
    logits_1 = reference.scale(logits, by=0.25)    # bf16[R, 101]
    return logits_1
