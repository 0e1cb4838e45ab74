def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(16, 10000.0))    # fp32[T, 8], fp32[T, 8]
    rows, kept = reference.local_tokens(tokens, offset("tensor", 2, 51), size=51)    # i64[T], i64[T]
    x = reference.embedding(rows, share(W("model.embed_tokens.weight", bf16[101, 48]), "tensor", 2))    # bf16[T, 48]; cpp: its weight is read by linear too
    x_partial = reference.mask_rows(x, kept)    # bf16[T, 48]
    x_1_partial = reference.scale(x_partial, by=6.928203230275509)    # bf16[T, 48]
    x_1 = gloo.all_reduce(x_1_partial, axis="tensor")    # bf16[T, 48]
    h = torch.rms_norm(x_1, shift(W("model.layers.0.input_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48]
    qkv = cpp.linear(h, shuffle(cat([share(W("model.layers.0.self_attn.q_proj.weight", bf16[64, 48]), "tensor", 2), share(W("model.layers.0.self_attn.k_proj.weight", bf16[32, 48]), "tensor", 2), share(W("model.layers.0.self_attn.v_proj.weight", bf16[32, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 64]
    q, k, v = reference.split(qkv, sizes=[32, 16, 16])    # bf16[T, 32], bf16[T, 16], bf16[T, 16]
    q_1 = reference.split_heads(q, heads=2)    # bf16[T, 2, 16]
    k_1 = reference.split_heads(k, heads=1)    # bf16[T, 1, 16]
    v_1 = reference.split_heads(v, heads=1)    # bf16[T, 1, 16]
    q_2 = cpp.norm_rope_write(q_1, k_1, v_1, cos, sin, None, None, KV("model.layers.0", bf16[2, 1, 16], window=10), batch)    # bf16[T, 2, 16]
    a = cpp.paged_attention(q_2, KV("model.layers.0", bf16[2, 1, 16], window=10), batch, scale=0.2041241452319315, window=10, softcap=2.0)    # bf16[T, 2, 16]
    a_1 = reference.merge_heads(a)    # bf16[T, 32]
    o_partial = torch.linear(a_1, shuffle(share(W("model.layers.0.self_attn.o_proj.weight", bf16[48, 64]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    o = gloo.all_reduce(o_partial, axis="tensor")    # bf16[T, 48]
    a_2 = torch.rms_norm(o, shift(W("model.layers.0.post_attention_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48]
    h_1, x_2 = torch.add_rms_norm(x_1, a_2, shift(W("model.layers.0.pre_feedforward_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    gate_up = cpp.linear(h_1, shuffle(cat([share(W("model.layers.0.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.0.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 80]
    m = reference.gated_activate(gate_up, kind="gelu_tanh")    # bf16[T, 40]
    down_partial = torch.linear(m, shuffle(share(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    down = gloo.all_reduce(down_partial, axis="tensor")    # bf16[T, 48]
    m_1 = torch.rms_norm(down, shift(W("model.layers.0.post_feedforward_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48]
    h_2, x_3 = torch.add_rms_norm(x_2, m_1, shift(W("model.layers.1.input_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    qkv_1 = cpp.linear(h_2, shuffle(cat([share(W("model.layers.1.self_attn.q_proj.weight", bf16[64, 48]), "tensor", 2), share(W("model.layers.1.self_attn.k_proj.weight", bf16[32, 48]), "tensor", 2), share(W("model.layers.1.self_attn.v_proj.weight", bf16[32, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 64]
    q_3, k_3, v_2 = reference.split(qkv_1, sizes=[32, 16, 16])    # bf16[T, 32], bf16[T, 16], bf16[T, 16]
    q_4 = reference.split_heads(q_3, heads=2)    # bf16[T, 2, 16]
    k_4 = reference.split_heads(k_3, heads=1)    # bf16[T, 1, 16]
    v_3 = reference.split_heads(v_2, heads=1)    # bf16[T, 1, 16]
    q_5 = cpp.norm_rope_write(q_4, k_4, v_3, cos, sin, None, None, KV("model.layers.1", bf16[2, 1, 16]), batch)    # bf16[T, 2, 16]
    a_3 = cpp.paged_attention(q_5, KV("model.layers.1", bf16[2, 1, 16]), batch, scale=0.2041241452319315, softcap=2.0)    # bf16[T, 2, 16]
    return x_3, a_3

def head(x_3: bf16[R, 48], a_3: bf16[R, 2, 16]):
    a_4 = reference.merge_heads(a_3)    # bf16[R, 32]
    o_1_partial = torch.linear(a_4, shuffle(share(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 64]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    o_1 = gloo.all_reduce(o_1_partial, axis="tensor")    # bf16[R, 48]
    a_5 = torch.rms_norm(o_1, shift(W("model.layers.1.post_attention_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[R, 48]
    h_3, x_4 = torch.add_rms_norm(x_3, a_5, shift(W("model.layers.1.pre_feedforward_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    gate_up = cpp.linear(h_3, shuffle(cat([share(W("model.layers.1.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.1.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[R, 80]
    m_2 = reference.gated_activate(gate_up, kind="gelu_tanh")    # bf16[R, 40]
    down_1_partial = torch.linear(m_2, shuffle(share(W("model.layers.1.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    down_1 = gloo.all_reduce(down_1_partial, axis="tensor")    # bf16[R, 48]
    m_3 = torch.rms_norm(down_1, shift(W("model.layers.1.post_feedforward_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[R, 48]
    hidden, x_5 = torch.add_rms_norm(x_4, m_3, shift(W("model.norm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    logits_2 = reference.linear(hidden, share(W("model.embed_tokens.weight", bf16[101, 48]), "tensor", 2))    # bf16[R, 51]; cpp: its weight is read by embedding too; torch: its weight is read by embedding too; widened: oneDNN multiplies bf16 on this CPU
    logits = gloo.all_gather(logits_2, axis="tensor", size=101)    # bf16[R, 101]
    logits_1 = reference.softcap(logits, cap=3.0)    # bf16[R, 101]
    return logits_1
