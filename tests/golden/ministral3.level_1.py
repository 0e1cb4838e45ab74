def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(16, 10000.0, kind="yarn", factor=4.0, original_max_position=16, beta_fast=16.0, beta_slow=2.0), scale=0.9753496504321066)    # fp32[T, 8], fp32[T, 8]
    q_cos, q_sin = reference.rotary(positions, rope_freqs(16, 10000.0, kind="yarn", factor=4.0, original_max_position=16, beta_fast=16.0, beta_slow=2.0), scale=0.9753496504321066, growth=0.4, period=16)    # fp32[T, 8], fp32[T, 8]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    h = torch.rms_norm(x, W("model.layers.0.input_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    qkv = cpp.linear(h, shuffle(cat([W("model.layers.0.self_attn.q_proj.weight", bf16[64, 48]), W("model.layers.0.self_attn.k_proj.weight", bf16[32, 48]), W("model.layers.0.self_attn.v_proj.weight", bf16[32, 48])]), "blocks"))    # bf16[T, 128]
    q, k, v = reference.split(qkv, sizes=[64, 32, 32])    # bf16[T, 64], bf16[T, 32], bf16[T, 32]
    q_1 = reference.split_heads(q, heads=4)    # bf16[T, 4, 16]
    k_1 = reference.split_heads(k, heads=2)    # bf16[T, 2, 16]
    v_1 = reference.split_heads(v, heads=2)    # bf16[T, 2, 16]
    q_2 = reference.rope(q_1, q_cos, q_sin)    # bf16[T, 4, 16]
    k_2 = reference.rope(k_1, cos, sin)    # bf16[T, 2, 16]
    q_8 = cpp.norm_rope_write(q_2, k_2, v_1, None, None, None, None, KV("model.layers.0", bf16[2, 2, 16]), batch)    # bf16[T, 4, 16]
    a = cpp.paged_attention(q_8, KV("model.layers.0", bf16[2, 2, 16]), batch, scale=0.25)    # bf16[T, 4, 16]
    a_1 = reference.merge_heads(a)    # bf16[T, 64]
    o = torch.linear(a_1, shuffle(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 64]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    h_1, x_1 = torch.add_rms_norm(x, o, W("model.layers.0.post_attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48], bf16[T, 48]
    gate_up = cpp.linear(h_1, shuffle(cat([W("model.layers.0.mlp.gate_proj.weight", bf16[80, 48]), W("model.layers.0.mlp.up_proj.weight", bf16[80, 48])]), "blocks"))    # bf16[T, 160]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[T, 80]
    down = torch.linear(m, shuffle(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    h_2, x_2 = torch.add_rms_norm(x_1, down, W("model.layers.1.input_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48], bf16[T, 48]
    qkv_1 = cpp.linear(h_2, shuffle(cat([W("model.layers.1.self_attn.q_proj.weight", bf16[64, 48]), W("model.layers.1.self_attn.k_proj.weight", bf16[32, 48]), W("model.layers.1.self_attn.v_proj.weight", bf16[32, 48])]), "blocks"))    # bf16[T, 128]
    q_3, k_3, v_2 = reference.split(qkv_1, sizes=[64, 32, 32])    # bf16[T, 64], bf16[T, 32], bf16[T, 32]
    q_4 = reference.split_heads(q_3, heads=4)    # bf16[T, 4, 16]
    k_4 = reference.split_heads(k_3, heads=2)    # bf16[T, 2, 16]
    v_3 = reference.split_heads(v_2, heads=2)    # bf16[T, 2, 16]
    q_5 = reference.rope(q_4, q_cos, q_sin)    # bf16[T, 4, 16]
    k_5 = reference.rope(k_4, cos, sin)    # bf16[T, 2, 16]
    q_9 = cpp.norm_rope_write(q_5, k_5, v_3, None, None, None, None, KV("model.layers.1", bf16[2, 2, 16]), batch)    # bf16[T, 4, 16]
    a_2 = cpp.paged_attention(q_9, KV("model.layers.1", bf16[2, 2, 16]), batch, scale=0.25)    # bf16[T, 4, 16]
    return x_2, a_2

def head(x_2: bf16[R, 48], a_2: bf16[R, 4, 16]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 64]
    o_1 = torch.linear(a_3, shuffle(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 64]), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    h_3, x_3 = torch.add_rms_norm(x_2, o_1, W("model.layers.1.post_attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48], bf16[R, 48]
    gate_up = cpp.linear(h_3, shuffle(cat([W("model.layers.1.mlp.gate_proj.weight", bf16[80, 48]), W("model.layers.1.mlp.up_proj.weight", bf16[80, 48])]), "blocks"))    # bf16[R, 160]
    m_1 = reference.gated_activate(gate_up, kind="silu")    # bf16[R, 80]
    down_1 = torch.linear(m_1, shuffle(W("model.layers.1.mlp.down_proj.weight", bf16[48, 80]), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    hidden, x_4 = torch.add_rms_norm(x_3, down_1, W("model.norm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48], bf16[R, 48]
    logits = cpp.linear(hidden, shuffle(W("lm_head.weight", bf16[101, 48]), "blocks"))    # bf16[R, 101]
    return logits
