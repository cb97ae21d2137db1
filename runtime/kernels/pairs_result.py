"""What becomes of the sums of a tile in `pairs_hopper`.

Letters: M tokens, N output features, BN, BM rows of W and tokens of a tile.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, type-arg"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

__all__ = ["finished", "store_tile"]


@gluon.jit
def finished(total, x_scale, outer, bias, n, m, M, N, x_step):
    """Turn sums [BN, BM] of features n and tokens m into results: scales, bias."""
    y = total.to(gl.float32)
    n_in, m_in = n < N, m < M
    if x_scale is not None:
        of_x = gl.load(x_scale + m * x_step, mask=m_in, other=0.0)
        of_x += of_x - of_x  # what is not finite makes NaN, whatever its codes are
        y *= gl.expand_dims(of_x, 0)
    if outer is not None:
        y *= gl.expand_dims(gl.load(outer + n, mask=n_in, other=0.0), 1)
    if bias is not None:
        y += gl.expand_dims(gl.load(bias + n, mask=n_in, other=0.0).to(gl.float32), 1)
    return y


@gluon.jit
def store_tile(y, out, n_start, m_start, n, m, M, N, num_warps: gl.constexpr):
    """Store results [BN, BM] to out [M, N]."""
    BN: gl.constexpr = y.shape[0]
    BM: gl.constexpr = y.shape[1]
    y = y.to(out.dtype.element_ty)
    if BM >= 64:  # to whole lines of the result
        LINES: gl.constexpr = gl.BlockedLayout(
            [1, 8], [256 // BN, BN // 8] if BN < 256 else [1, 32], [num_warps, 1], [1, 0]
        )
        y = gl.convert_layout(y.permute((1, 0)), LINES)
        nn = gl.expand_dims(n_start + gl.arange(0, BN, layout=gl.SliceLayout(0, LINES)), 0)
        mm = gl.expand_dims(m_start + gl.arange(0, BM, layout=gl.SliceLayout(1, LINES)), 1)
        gl.store(out + mm.to(gl.int64) * N + nn, y, mask=(mm < M) & (nn < N))
    else:
        nn, mm = gl.expand_dims(n, 1), gl.expand_dims(m, 0)
        gl.store(out + mm.to(gl.int64) * N + nn, y, mask=(mm < M) & (nn < N))
