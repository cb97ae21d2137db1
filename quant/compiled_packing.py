"""Loops that pack bit fields on a CPU, compiled by numba; `compiled` is the way in.

Fields come as whole words of 2, 4 or 8 of them, one a byte. Before anything else the bits of `flip`
are turned over, which makes offset binary of two's complement.

`pack_eight_rows` packs two's complement of 4 bits, one a byte, down the rows: of codes [N, K] the
word [k, j] of [K, N / 8] holds those of the rows 8 * j and on, at 0, 4, 1, 5, 2, 6, 3, 7. A tile of
words is turned at a time, so that whole lines of the cache are read and written.
"""

from __future__ import annotations

import numpy as np

from quantload.quant.compiled_jit import Kernel


def _pack_halves(pairs, packed, flip):
    for i in range(packed.size):
        pair = pairs[i] ^ flip
        packed[i] = (pair & np.uint16(0xF)) | ((pair >> np.uint16(4)) & np.uint16(0xF0))


def _pack_quarters(fours, packed, flip):
    for i in range(packed.size):
        four = (fours[i] ^ flip) & np.uint32(0x03030303)
        four |= four >> np.uint32(6)
        packed[i] = (four & np.uint32(0xF)) | ((four >> np.uint32(12)) & np.uint32(0xF0))


def _pack_strings(eights, packed, flip, bits, lanes):
    for i in range(eights.size):
        string = (eights[i] ^ flip) & lanes[0]
        for step in range(3):  # lanes of one field become lanes of two, of four, of eight
            even = lanes[step + 1]
            odd = even << np.uint64(bits << step)
            moved = string >> np.uint64((8 - bits) << step)
            string = (string & even) | (moved & odd)
        for j in range(bits):
            packed[i * bits + j] = np.uint8(string >> np.uint64(8 * j))


def _pack_eight_rows(codes, packed, tile):
    rows, columns = packed.shape[1], packed.shape[0]
    height, width = tile.shape
    for first in range(0, columns, width):
        count = min(width, columns - first)
        for above in range(0, rows, height):
            many = min(height, rows - above)
            for j in range(many):
                n = 8 * (above + j)
                for k in range(count):
                    word = np.uint32(0)
                    for i in range(8):
                        field = np.uint32(codes[n + i, first + k] & np.uint8(15)) ^ np.uint32(8)
                        word |= field << np.uint32(4 * (i // 2) + 16 * (i % 2))
                    tile[j, k] = word
            for k in range(count):
                for j in range(many):
                    packed[first + k, above + j] = tile[j, k]


pack_eight_rows = Kernel(_pack_eight_rows)
pack_halves = Kernel(_pack_halves)
pack_quarters = Kernel(_pack_quarters)
pack_strings = Kernel(_pack_strings)
