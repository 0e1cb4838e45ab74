def body(tokens: i64[T], positions: i64[T]):
    x = embedding(tokens, W("backbone.embeddings.weight", bf16[101, 48]))    # bf16[T, 48]
    h = rms_norm(x, W("backbone.layers.0.norm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    mamba_in = linear(h, W("backbone.layers.0.mixer.in_proj.weight", bf16[150, 48]))    # bf16[T, 150]
    z, xbc, dt = split(mamba_in, sizes=[42, 102, 6])    # bf16[T, 42], bf16[T, 102], bf16[T, 6]
    conv = causal_conv(xbc, STATE("backbone.layers.0", bf16[3, 102]), W("backbone.layers.0.mixer.conv1d.weight", bf16[102, 4]), W("backbone.layers.0.mixer.conv1d.bias", bf16[102]), kind="silu")    # bf16[T, 102]
    x_1, b, c = split(conv, sizes=[42, 30, 30])    # bf16[T, 42], bf16[T, 30], bf16[T, 30]
    x_2 = split_heads(x_1, heads=6)    # bf16[T, 6, 7]
    b_1 = split_heads(b, heads=3)    # bf16[T, 3, 10]
    c_1 = split_heads(c, heads=3)    # bf16[T, 3, 10]
    dt_1 = time_step(dt, W("backbone.layers.0.mixer.dt_bias", fp32[6]), low=0.001)    # fp32[T, 6]
    y = ssd(x_2, dt_1, b_1, c_1, STATE("backbone.layers.0", fp32[6, 7, 10]), W("backbone.layers.0.mixer.A_log", fp32[6]), W("backbone.layers.0.mixer.D", fp32[6]))    # bf16[T, 6, 7]
    y_1 = merge_heads(y)    # bf16[T, 42]
    z_1 = activate(z, kind="silu")    # bf16[T, 42]
    y_2 = mul(y_1, z_1)    # bf16[T, 42]
    y_3 = group_rms_norm(y_2, W("backbone.layers.0.mixer.norm.weight", bf16[42]), eps=1e-05, groups=3)    # bf16[T, 42]
    mamba_out = linear(y_3, W("backbone.layers.0.mixer.out_proj.weight", bf16[48, 42]))    # bf16[T, 48]
    x_3 = add(x, mamba_out)    # bf16[T, 48]
    h_1 = rms_norm(x_3, W("backbone.layers.1.norm.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    up = linear(h_1, W("backbone.layers.1.mixer.up_proj.weight", bf16[80, 48]))    # bf16[T, 80]
    m = activate(up, kind="relu2")    # bf16[T, 80]
    down = linear(m, W("backbone.layers.1.mixer.down_proj.weight", bf16[48, 80]))    # bf16[T, 48]
    x_4 = add(x_3, down)    # bf16[T, 48]
    hidden = rms_norm(x_4, W("backbone.norm_f.weight", bf16[48]), eps=1e-05)    # bf16[T, 48]
    return hidden

def head(hidden: bf16[R, 48]):
    logits = linear(hidden, W("lm_head.weight", bf16[101, 48]))    # bf16[R, 101]
    return logits
