"""Times to reach, in us on one H200, as judged before the kernels were built."""

_TOKENS = (1, 4, 16, 64, 256, 1024, 4096)


def _row(*goals: float) -> dict[int, float]:
    return dict(zip(_TOKENS, goals, strict=True))


_W4A16 = {
    "s.4096x1024": _row(3.1, 3.4, 4.3, 6.5, 8.3, 17.5, 58),
    "s.6144x1024": _row(3.9, 4.2, 5.0, 8.0, 10, 25, 80),
    "8b.o": _row(5.6, 6.2, 6.8, 11.5, 21, 53, 182),
    "8b.qkv": _row(7.0, 7.8, 8.8, 13.5, 27, 75, 270),
    "8b.down": _row(11.5, 12, 13.5, 21.5, 50, 165, 620),
    "8b.gate_up": _row(18.5, 19, 21.5, 35, 90, 315, 1300),
    "70b.down": _row(33, 34, 39, 65, 165, 620, 2700),
    "70b.gate_up": _row(58, 60, 68, 125, 335, 1270, 5700),
}
GOALS: dict[str, dict[str, dict[int, float]]] = {
    "w4a16_g128": _W4A16,
    "w4a16_g128_asym": {
        shape: {m: round(us * 1.03, 2) for m, us in row.items()} for shape, row in _W4A16.items()
    },
    "mxfp4_a16": {
        "8b.gate_up": {1: 22, 16: 31.1},
        "8b.qkv": {1: 11.6},
    },
    "nvfp4_a16": {
        "8b.gate_up": {1: 24, 16: 32.3},
        "8b.qkv": {1: 11.9},
    },
    "fp8_ch": {
        "8b.o": {1: 6.8, 16: 7.0, 64: 7.4, 256: 13, 1024: 26, 4096: 98},
        "8b.qkv": {1: 8.3, 16: 8.5, 64: 9.2, 256: 14, 1024: 40, 4096: 145},
        "8b.down": {1: 16.5, 16: 16.8, 64: 18.2, 256: 33, 1024: 79, 4096: 315},
        "8b.gate_up": {1: 28.7, 16: 30, 64: 31.5, 256: 54, 1024: 170, 4096: 665},
    },
    "fp8_blk": {
        "8b.qkv": {1: 9.5, 16: 9.5, 64: 9.5},
        "8b.gate_up": {1: 30.5, 16: 30.5, 64: 30.5},
    },
}
