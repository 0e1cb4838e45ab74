"""The piece that these tests compile."""

TEXT = """\
def piece(x0: fp32[A, 8], w0: fp32[8]):
    y = inductor.rms_norm(x0, w0, eps=1e-06)
    return y
"""
