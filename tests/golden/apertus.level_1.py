def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(12, 10000.0, kind="llama3", factor=4.0, original_max_position=32))    # fp32[T, 6], fp32[T, 6]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    h = torch.rms_norm(x, W("model.layers.0.attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    qkv = cpp.linear(h, shuffle(cat([W("model.layers.0.self_attn.q_proj.weight", bf16[48, 48]), W("model.layers.0.self_attn.k_proj.weight", bf16[24, 48]), W("model.layers.0.self_attn.v_proj.weight", bf16[24, 48])]), "blocks"))    # bf16[T, 96]
    q, k, v = reference.split(qkv, sizes=[48, 24, 24])    # bf16[T, 48], bf16[T, 24], bf16[T, 24]
    q_1 = reference.split_heads(q, heads=4)    # bf16[T, 4, 12]
    k_1 = reference.split_heads(k, heads=2)    # bf16[T, 2, 12]
    v_1 = reference.split_heads(v, heads=2)    # bf16[T, 2, 12]
    q_3 = cpp.norm_rope_write(q_1, k_1, v_1, cos, sin, W("model.layers.0.self_attn.q_norm.weight", bf16[12]), W("model.layers.0.self_attn.k_norm.weight", bf16[12]), KV("model.layers.0", bf16[2, 2, 12]), batch, eps=1e-05)    # bf16[T, 4, 12]
    a = cpp.paged_attention(q_3, KV("model.layers.0", bf16[2, 2, 12]), batch, scale=0.28867513459481287)    # bf16[T, 4, 12]
    a_1 = reference.merge_heads(a)    # bf16[T, 48]
    o = torch.linear(a_1, shuffle(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 48]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    h_1, x_1 = torch.add_rms_norm(x, o, W("model.layers.0.feedforward_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48], bf16[T, 48]
    up = cpp.linear(h_1, shuffle(W("model.layers.0.mlp.up_proj.weight", bf16[80, 48]), "blocks"))    # bf16[T, 80]
    m = reference.xielu(up, W("model.layers.0.mlp.act_fn.alpha_p", bf16[1]), W("model.layers.0.mlp.act_fn.alpha_n", bf16[1]))    # bf16[T, 80]
    down = torch.linear(m, shuffle(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    h_2, x_2 = torch.add_rms_norm(x_1, down, W("model.layers.1.attention_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48], bf16[T, 48]
    qkv_1 = cpp.linear(h_2, shuffle(cat([W("model.layers.1.self_attn.q_proj.weight", bf16[48, 48]), W("model.layers.1.self_attn.k_proj.weight", bf16[24, 48]), W("model.layers.1.self_attn.v_proj.weight", bf16[24, 48])]), "blocks"))    # bf16[T, 96]
    q_4, k_4, v_2 = reference.split(qkv_1, sizes=[48, 24, 24])    # bf16[T, 48], bf16[T, 24], bf16[T, 24]
    q_5 = reference.split_heads(q_4, heads=4)    # bf16[T, 4, 12]
    k_5 = reference.split_heads(k_4, heads=2)    # bf16[T, 2, 12]
    v_3 = reference.split_heads(v_2, heads=2)    # bf16[T, 2, 12]
    q_7 = cpp.norm_rope_write(q_5, k_5, v_3, cos, sin, W("model.layers.1.self_attn.q_norm.weight", bf16[12]), W("model.layers.1.self_attn.k_norm.weight", bf16[12]), KV("model.layers.1", bf16[2, 2, 12]), batch, eps=1e-05)    # bf16[T, 4, 12]
    a_2 = cpp.paged_attention(q_7, KV("model.layers.1", bf16[2, 2, 12]), batch, scale=0.28867513459481287)    # bf16[T, 4, 12]
    return x_2, a_2

def head(x_2: bf16[R, 48], a_2: bf16[R, 4, 12]):
    a_3 = reference.merge_heads(a_2)    # bf16[R, 48]
    o_1 = torch.linear(a_3, shuffle(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 48]), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    h_3, x_3 = torch.add_rms_norm(x_2, o_1, W("model.layers.1.feedforward_layernorm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48], bf16[R, 48]
    up_1 = cpp.linear(h_3, shuffle(W("model.layers.1.mlp.up_proj.weight", bf16[80, 48]), "blocks"))    # bf16[R, 80]
    m_1 = reference.xielu(up_1, W("model.layers.1.mlp.act_fn.alpha_p", bf16[1]), W("model.layers.1.mlp.act_fn.alpha_n", bf16[1]))    # bf16[R, 80]
    down_1 = torch.linear(m_1, shuffle(W("model.layers.1.mlp.down_proj.weight", bf16[48, 80]), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    hidden, x_4 = torch.add_rms_norm(x_3, down_1, W("model.norm.weight", bf16[48]), eps=1e-05)    # bf16[R, 48], bf16[R, 48]
    logits = cpp.linear(hidden, shuffle(W("lm_head.weight", bf16[101, 48]), "blocks"))    # bf16[R, 101]
    return logits
