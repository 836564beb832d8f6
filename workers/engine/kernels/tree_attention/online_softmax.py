"""What both attention kernels do with a tile of scores and with a finished result."""

import triton
import triton.language as tl

from workers.engine.kernels.encode.kernel import e4m3_codes


@triton.jit
def softmax_step(s, m, total, scale):
    """(weights of scores s [BM, BN], what the result so far fades by, new maximum, new sum): in float32."""
    top = tl.maximum(m, tl.max(s, 1))
    # A row that has seen no key yet has no maximum to subtract.
    safe = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(tl.fma(s, scale, -(safe * scale)[:, None]))
    fade = tl.exp2((m - safe) * scale)
    # What a row does not see is zero: the sum has the same bits in whichever slot its span stands.
    return p, fade, top, total * fade + tl.sum(p, 1)


@triton.jit
def store_result(p_out, o_out, out, keep, p_scale, KIND: tl.constexpr):
    """The result in the type of `p_out`, or as fp8 codes of one scale."""
    if KIND == "fp8_static":
        tl.store(p_out + o_out, e4m3_codes(out, tl.load(p_scale)), mask=keep)
    else:
        tl.store(p_out + o_out, out.to(p_out.dtype.element_ty), mask=keep)
