def body(tokens: i64[T], positions: i64[T], batch: Batch):
    cos, sin = reference.rotary(positions, rope_freqs(4, 10000.0))    # fp32[T, 2], fp32[T, 2]
    x = reference.embedding(tokens, W("model.embed_tokens.weight", bf16[101, 48]))    # bf16[T, 48]; cpp: no matmul reads its weight
    h = torch.rms_norm(x, shift(W("model.layers.0.input_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48]
    qkv_z_beta_a = cpp.linear(h, shuffle(cat([cat([share(slice(W("model.layers.0.linear_attn.in_proj_qkv.weight", bf16[82, 48]), 0, 20), "tensor", 2), share(slice(W("model.layers.0.linear_attn.in_proj_qkv.weight", bf16[82, 48]), 20, 40), "tensor", 2), share(slice(W("model.layers.0.linear_attn.in_proj_qkv.weight", bf16[82, 48]), 40, 82), "tensor", 2)]), share(W("model.layers.0.linear_attn.in_proj_z.weight", bf16[42, 48]), "tensor", 2), share(W("model.layers.0.linear_attn.in_proj_b.weight", bf16[6, 48]), "tensor", 2), share(W("model.layers.0.linear_attn.in_proj_a.weight", bf16[6, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 68]
    qkv, z, beta, a = reference.split(qkv_z_beta_a, sizes=[41, 21, 3, 3])    # bf16[T, 41], bf16[T, 21], bf16[T, 3], bf16[T, 3]
    conv = cpp.batched_causal_conv(qkv, STATE("model.layers.0", bf16[3, 41]), batch, cat([share(slice(W("model.layers.0.linear_attn.conv1d.weight", bf16[82, 4]), 0, 20), "tensor", 2), share(slice(W("model.layers.0.linear_attn.conv1d.weight", bf16[82, 4]), 20, 40), "tensor", 2), share(slice(W("model.layers.0.linear_attn.conv1d.weight", bf16[82, 4]), 40, 82), "tensor", 2)]), kind="silu")    # bf16[T, 41]
    q, k, v = reference.split(conv, sizes=[10, 10, 21])    # bf16[T, 10], bf16[T, 10], bf16[T, 21]
    q_1 = reference.split_heads(q, heads=1)    # bf16[T, 1, 10]
    k_1 = reference.split_heads(k, heads=1)    # bf16[T, 1, 10]
    v_1 = reference.split_heads(v, heads=3)    # bf16[T, 3, 7]
    z_1 = reference.split_heads(z, heads=3)    # bf16[T, 3, 7]
    beta_1 = reference.activate(beta, kind="sigmoid")    # bf16[T, 3]
    decay = reference.ssm_decay(a, share(W("model.layers.0.linear_attn.A_log", fp32[6]), "tensor", 2), share(W("model.layers.0.linear_attn.dt_bias", fp32[6]), "tensor", 2))    # fp32[T, 3]
    o = cpp.batched_gated_delta(q_1, k_1, v_1, decay, beta_1, STATE("model.layers.0", fp32[3, 10, 7]), batch, scale=0.31622776601683794, normalize=True)    # bf16[T, 3, 7]
    o_1 = torch.rms_norm(o, W("model.layers.0.linear_attn.norm.weight", bf16[7]), eps=1e-06)    # bf16[T, 3, 7]
    z_2 = reference.activate(z_1, kind="silu")    # bf16[T, 3, 7]
    o_2 = reference.mul(o_1, z_2)    # bf16[T, 3, 7]
    o_3 = reference.merge_heads(o_2)    # bf16[T, 21]
    delta_out_partial = torch.linear(o_3, shuffle(share(W("model.layers.0.linear_attn.out_proj.weight", bf16[48, 42]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    delta_out = gloo.all_reduce(delta_out_partial, axis="tensor")    # bf16[T, 48]
    h_1, x_1 = torch.add_rms_norm(x, delta_out, shift(W("model.layers.0.post_attention_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    gate_up = cpp.linear(h_1, shuffle(cat([share(W("model.layers.0.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.0.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 80]
    m = reference.gated_activate(gate_up, kind="silu")    # bf16[T, 40]
    down_partial = torch.linear(m, shuffle(share(W("model.layers.0.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[T, 48]; cpp: 48 rows are no block
    down = gloo.all_reduce(down_partial, axis="tensor")    # bf16[T, 48]
    h_2, x_2 = torch.add_rms_norm(x_1, down, shift(W("model.layers.1.input_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[T, 48], bf16[T, 48]
    qkv_1 = cpp.linear(h_2, shuffle(cat([share(slices(W("model.layers.1.self_attn.q_proj.weight", bf16[128, 48]), 0, 16, 32, 4), "tensor", 2), share(W("model.layers.1.self_attn.k_proj.weight", bf16[32, 48]), "tensor", 2), share(W("model.layers.1.self_attn.v_proj.weight", bf16[32, 48]), "tensor", 2)]), "blocks"))    # bf16[T, 64]
    q_2, k_2, v_2 = reference.split(qkv_1, sizes=[32, 16, 16])    # bf16[T, 32], bf16[T, 16], bf16[T, 16]
    q_3 = reference.split_heads(q_2, heads=2)    # bf16[T, 2, 16]
    k_3 = reference.split_heads(k_2, heads=1)    # bf16[T, 1, 16]
    v_3 = reference.split_heads(v_2, heads=1)    # bf16[T, 1, 16]
    q_5 = cpp.norm_rope_write(q_3, k_3, v_3, cos, sin, shift(W("model.layers.1.self_attn.q_norm.weight", fp32[16]), 1.0), shift(W("model.layers.1.self_attn.k_norm.weight", fp32[16]), 1.0), KV("model.layers.1", bf16[2, 1, 16]), batch, eps=1e-06)    # bf16[T, 2, 16]
    a_1 = cpp.paged_attention(q_5, KV("model.layers.1", bf16[2, 1, 16]), batch, scale=0.25)    # bf16[T, 2, 16]
    return x_2, h_2, a_1

def head(x_2: bf16[R, 48], h_2: bf16[R, 48], a_1: bf16[R, 2, 16]):
    q_gate = torch.linear(h_2, shuffle(share(slices(W("model.layers.1.self_attn.q_proj.weight", bf16[128, 48]), 16, 32, 32, 4), "tensor", 2), "onednn"))    # bf16[R, 32]; cpp: 32 rows are no block
    a_2 = reference.merge_heads(a_1)    # bf16[R, 32]
    gate_1 = reference.activate(q_gate, kind="sigmoid")    # bf16[R, 32]
    a_3 = reference.mul(a_2, gate_1)    # bf16[R, 32]
    o_4_partial = torch.linear(a_3, shuffle(share(W("model.layers.1.self_attn.o_proj.weight", bf16[48, 64]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    o_4 = gloo.all_reduce(o_4_partial, axis="tensor")    # bf16[R, 48]
    h_3, x_3 = torch.add_rms_norm(x_2, o_4, shift(W("model.layers.1.post_attention_layernorm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    gate_up = cpp.linear(h_3, shuffle(cat([share(W("model.layers.1.mlp.gate_proj.weight", bf16[80, 48]), "tensor", 2), share(W("model.layers.1.mlp.up_proj.weight", bf16[80, 48]), "tensor", 2)]), "blocks"))    # bf16[R, 80]
    m_1 = reference.gated_activate(gate_up, kind="silu")    # bf16[R, 40]
    down_1_partial = torch.linear(m_1, shuffle(share(W("model.layers.1.mlp.down_proj.weight", bf16[48, 80]), "tensor", 2, dim=1), "onednn"))    # bf16[R, 48]; cpp: 48 rows are no block
    down_1 = gloo.all_reduce(down_1_partial, axis="tensor")    # bf16[R, 48]
    hidden, x_4 = torch.add_rms_norm(x_3, down_1, shift(W("model.norm.weight", fp32[48]), 1.0), eps=1e-06)    # bf16[R, 48], bf16[R, 48]
    logits_1 = torch.linear(hidden, shuffle(share(W("lm_head.weight", bf16[101, 48]), "tensor", 2), "onednn"))    # bf16[R, 51]; cpp: 51 rows are no block
    logits = gloo.all_gather(logits_1, axis="tensor", size=101)    # bf16[R, 101]
    return logits
