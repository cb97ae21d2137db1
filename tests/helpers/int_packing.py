"""Slow packers of integer weights, field by field as the formats say: GPTQ, its planes, AWQ.

They import nothing of ours but what a checkpoint in memory is.
"""

from pathlib import Path

import numpy as np
import tiny_checkpoints
import torch

from quantload.loader.checkpoint import Checkpoint, TensorEntry

PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}
GEMM_PLACE = {4: [0, 4, 1, 5, 2, 6, 3, 7], 8: [0, 2, 1, 3]}


def memory_checkpoint(tensors, quantization_config, *, config=None, file="config.json"):
    """A checkpoint of tensors in memory."""
    entries = {
        name: TensorEntry(name, t.dtype, tuple(t.shape), Path("none"), 0, t.nbytes, loaded=t)
        for name, t in tensors.items()
    }
    return Checkpoint(
        "memory",
        Path("none"),
        config or {},
        entries,
        quantization_config=quantization_config,
        quantization_config_file=file,
    )


def words_of(number, count):
    """A long number as little-endian 32-bit words, as signed integers."""
    words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(count)]
    return [word - (1 << 32) if word >= 1 << 31 else word for word in words]


def dense_words(values, bits):
    """Field i in bits i * b and up of one long number."""
    number = sum(int(value) << (bits * i) for i, value in enumerate(values))
    return words_of(number, -(-len(values) * bits // 32))


def planar_words(values, bits):
    """Blocks of 32 fields: words of their low bits, then words of their higher bits."""
    words = []
    for start in range(0, len(values), 32):
        block, offset = values[start : start + 32], 0
        for width in PLANES.get(bits, (bits,)):
            plane = [(int(value) >> offset) & ((1 << width) - 1) for value in block]
            words += dense_words(plane, width)
            offset += width
    return words


def gptq_tensors(fields, zeros, scales, *, bits, planar=False, offset=1, borrow=False, groups=None):
    """The tensors of a GPTQ module.

    Args:
        fields: [N, K] unsigned.
        zeros: [N, G] unsigned zero points; None leaves them out.
        scales: [N, G] float tensor.
        bits: Bits of a field.
        planar: Whether fields are split into planes.
        offset: 1 for v1, 0 for v2.
        borrow: Whether the offset is taken from whole words.
        groups: [K] group of each column.
    """
    pack = planar_words if planar else dense_words
    made = {
        "qweight": torch.tensor([pack(row, bits) for row in fields], dtype=torch.int32).T,
        "scales": scales.T,
    }
    if zeros is not None:
        columns = np.asarray(zeros).T
        if offset and borrow:
            ones = sum(1 << (bits * i) for i in range(32 // bits))
            rows = [
                [
                    words_of(((word & 0xFFFFFFFF) - ones) & 0xFFFFFFFF, 1)[0]
                    for word in pack(z, bits)
                ]
                for z in columns
            ]
        else:
            rows = [pack((z.astype(np.int64) - offset) % (1 << bits), bits) for z in columns]
        made["qzeros"] = torch.tensor(rows, dtype=torch.int32)
    if groups is not None:
        made["g_idx"] = torch.tensor(np.asarray(groups), dtype=torch.int32)
    return {leaf: tensor.contiguous() for leaf, tensor in made.items()}


def gemm_words(values, bits):
    """AWQ gemm: of each 8 columns number j is the field at its place (8 bits: of each 4)."""
    place = GEMM_PLACE.get(bits, GEMM_PLACE[4])
    shuffled = [0] * len(values)
    for column, value in enumerate(values):
        run, j = divmod(column, len(place))
        shuffled[run * len(place) + place[j]] = value
    return dense_words(shuffled, bits)


def awq_tensors(fields, zeros, scales, *, bits, kind="gemm", padded_groups=0):
    """The tensors of an AWQ module.

    Args:
        fields: [N, K] unsigned.
        zeros: [N, G] unsigned zero points; None leaves them out.
        scales: [N, G] float tensor.
        bits: Bits of a field.
        kind: gemm, gemv or gemv_fast.
        padded_groups: Groups that gemv and gemv_fast store, a multiple of 8.
    """
    if kind == "gemm":
        made = {
            "qweight": torch.tensor([gemm_words(row, bits) for row in np.asarray(fields).T]),
            "scales": scales.T,
        }
        if zeros is not None:
            made["qzeros"] = torch.tensor([gemm_words(row, bits) for row in np.asarray(zeros).T])
        return {k: _stored(t) for k, t in made.items()}
    wide = torch.nn.functional.pad(scales, (0, padded_groups - scales.shape[1]))
    points = np.pad(np.asarray(zeros), ((0, 0), (0, padded_groups - scales.shape[1])))
    if kind == "gemv":
        made = {
            "qweight": torch.tensor([dense_words(row, 4) for row in fields]),
            "qzeros": torch.tensor([dense_words(row, 4) for row in points]),
            "scales": wide,
        }
        return {k: _stored(t) for k, t in made.items()}
    offsets = -(wide.float() * torch.tensor(points).float()).to(torch.float16)
    return {
        "qweight": torch.tensor(fast_words(np.asarray(fields)), dtype=torch.int16),
        "qzeros": offsets.T.contiguous(),
        "scales": wide.T.contiguous(),
    }


def _stored(tensor):
    return (tensor if tensor.dtype.is_floating_point else tensor.to(torch.int32)).contiguous()


def fast_words(fields):
    """AWQ gemv_fast: [N, K] to [N / 4, K] 16-bit words, as AutoAWQ describes the steps.

    Of each row, runs of 32 are seen as 4 x 4 pairs and transposed; then of each 8 the even ones
    come first. Four rows meet in pieces of 64, four neighbours in a word.
    """
    rows, columns = fields.shape
    steps = np.empty_like(fields)
    for run in range(0, columns, 32):
        part = fields[:, run : run + 32]
        pairs = [part[:, 8 * i + 2 * j : 8 * i + 2 * j + 2] for j in range(4) for i in range(4)]
        line = np.concatenate(pairs, axis=1)
        for eight in range(0, 32, 8):
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            steps[:, run + eight : run + eight + 8] = line[:, eight : eight + 8][:, order]
    words = []
    for four in range(0, rows, 4):
        row = []
        for piece in range(0, columns, 64):
            nibbles = steps[four : four + 4, piece : piece + 64].reshape(-1)
            row += [
                sum(int(n) << (4 * i) for i, n in enumerate(nibbles[at : at + 4]))
                for at in range(0, 256, 4)
            ]
        words.append([w - (1 << 16) if w >= 1 << 15 else w for w in row])
    return np.array(words)


def random_parts(rows, columns, groups, bits, *, seed=0, dtype=torch.float16):
    """Random fields [N, K], zero points [N, G] and scales [N, G]."""
    rng = np.random.default_rng(seed)
    fields = rng.integers(0, 1 << bits, (rows, columns))
    zeros = rng.integers(0, 1 << bits, (rows, groups))
    scales = torch.from_numpy(rng.uniform(0.001, 0.02, (rows, groups))).to(dtype)
    return fields, zeros, scales


def values_of(fields, zeros, scales, groups, dtype):
    """(u - z) * scale, the product rounded once to `dtype`; [N, K].

    Factors are cast to `dtype` first; of at most 9 and 11 bits, their product is exact in float32.
    """
    groups = np.asarray(groups)
    steps = torch.tensor(np.asarray(fields) - np.asarray(zeros)[:, groups], dtype=torch.float32)
    factors = scales.to(dtype).to(torch.float32)[:, torch.tensor(groups)]
    return (steps * factors).to(dtype)


def quantized_llama(
    folder, pack, quantization_config, *, layers=1, dtype=torch.float16, change=None
):
    """Write a tiny llama whose linear layers in blocks are packed; returns their values by module.

    Args:
        folder: Where.
        pack: (module, rows, columns) -> (tensors by leaf, values [N, K]).
        quantization_config: Goes into config.json; None leaves it out.
        layers: Number of layers.
        dtype: dtype of the model.
        change: Called with the tensors and the config before they are written.
    """
    content = tiny_checkpoints.config(hidden=64, intermediate=128, layers=layers, dtype=dtype)
    tensors = tiny_checkpoints.tensors(content)
    values = {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        module = name.removesuffix(".weight")
        rows, columns = tensors.pop(name).shape
        leaves, values[module] = pack(module, rows, columns)
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
    if quantization_config is not None:
        content["quantization_config"] = dict(quantization_config)
    if change is not None:
        change(tensors, content)
    tiny_checkpoints.write(folder, content, tensors)
    return values
