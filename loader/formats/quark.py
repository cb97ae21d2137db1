"""AMD Quark, as its `quark` export writes it (`weight_format: real_quantized`).

N output features, K input features, g columns of a group, G = K / g, s = weight_scale,
z = weight_zero_point.

grid          weight              weight_scale                     value
e4m3, e5m2    [N, K]              float [], [N], [N, G], blocks    q * s
int8, uint8   [N, K]              float [] or [N]                  (q - z) * s
  per group   [K, N]              [G, N]
int4, uint4   int32               float                            (q - z) * s
  per group   [K, ceil(N / 8)]    [G, N]
  else        [N, K / 8]          [N] or []
e2m1          uint8 [N, K / 2]    uint8 [N, G] or float [N, G]     q * s, low nibble first
e2m3, e3m2    uint8 [N, K * 6/8]  as e2m1                          q * s, fields from low bits up
NVFP4         uint8 [N, K / 2]    e4m3 [N, G]                      q * (s * weight_scale_2)

Where the config says `scale_format: e8m0`, scales are uint8 and mean 2^(s - 127). Eight fields of
int4 fill a word along its last axis from the lowest bits up: in order, or with `pack_method:
reorder` as 0, 2, 4, 6, 1, 3, 5, 7. int4 is two's complement, uint4 is unsigned.

`weight_zero_point` is shaped as the scale; for 4 bits its last axis is packed as that of the
weight, scalars are not. Symmetric weights may have one of zeros.

All is evaluated in the dtype of the scale: bfloat16 where the model was; powers of two, whose
products are exact, in bfloat16 too. NVFP4 is evaluated in float32. `weight_scale_2` is a
multiplier.

Older exports call the leaves `weight_quantizer.scale`, `weight_quantizer.zero_point` and
`input_quantizer.scale`. Scales of the key-value cache are `k_proj.output_scale`; see
`cache_scales.py`.

Source: AMD Quark 0.13, its checkpoints and `torch/export/nn/modules/realquantizer.py`; transformers
5.24.0 `integrations/quark`, vLLM 0.33.0 `quantization/quark` for NVFP4 and the names of older
exports.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from quantload.errors import FormatMismatch, MissingTensor, listed
from quantload.loader.checkpoint import Checkpoint
from quantload.loader.formats.agreement import (
    ConfigSays,
    about_unused_entries,
    check_agreement,
    count_entries,
)
from quantload.loader.formats.cache_scales import with_usual_cache_names
from quantload.loader.formats.dense import dense_weight
from quantload.loader.formats.module_leaves import (
    ModuleLeaves,
    by_module,
    refuse_leftovers,
    refuse_unknown_parts,
)
from quantload.loader.formats.quark_config import matches_entry, parse_config
from quantload.loader.formats.quark_layouts import describe, read_weight
from quantload.loader.source import FLOAT_DTYPES, Reader, SourceWeight
from quantload.quant.qtensor import QuantTensor

_RENAMED = {
    "weight_quantizer.scale": "weight_scale",
    "weight_quantizer.zero_point": "weight_zero_point",
    "input_quantizer.scale": "input_scale",
    "input_quantizer.zero_point": "input_zero_point",
    "output_quantizer.scale": "output_scale",
    "output_quantizer.zero_point": "output_zero_point",
}
_LEAVES = (
    "weight",
    "weight_scale",
    "weight_scale_2",
    "weight_zero_point",
    "input_scale",
    "input_scale_2",
    "input_zero_point",
)


class QuarkReader(Reader):
    """Reader of one Quark checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(with_usual_cache_names(_with_usual_leaves(checkpoint)))
        assert checkpoint.quantization_config is not None, "detected by its config"
        self._config = parse_config(checkpoint.quantization_config)
        self.cache_scheme = self._config.cache_scheme

    def weights(self) -> Mapping[str, SourceWeight]:
        """Describe every weight, by module; config and headers must agree."""
        found: dict[str, SourceWeight] = {}
        said: dict[str, ConfigSays] = {}
        for module, leaves in by_module(self.checkpoint, _LEAVES).items():
            if "weight" not in leaves:
                raise MissingTensor(
                    f"tensor `{module}.weight` is missing in `{self.checkpoint.name}`; the module "
                    f"has {listed(leaves.entries)}"
                )
            entry = leaves["weight"]
            is_stored = len(leaves.entries) > 1 or entry.dtype not in FLOAT_DTYPES
            weight = self._describe(leaves, said) if is_stored else dense_weight(entry)
            if weight is not None:
                found[module] = weight
                if not is_stored:
                    said[module] = self._config.of_module(module)[0]
        stored = {module: weight.is_quantized for module, weight in found.items()}
        self.warnings += check_agreement(said, stored, self.checkpoint.name)
        self.entries = count_entries(said, stored)
        self.warnings += about_unused_entries(
            self._config.entries(), self.entries, self.checkpoint, matches_entry
        )
        refuse_leftovers(
            self.checkpoint, (name for w in found.values() for name in w.leaves.values())
        )
        refuse_unknown_parts(self.checkpoint, found)
        return found

    def _describe(self, leaves: ModuleLeaves, said: dict[str, ConfigSays]) -> SourceWeight:
        says, layer = self._config.of_module(leaves.module)
        said[leaves.module] = says
        if layer.weight is None:
            raise FormatMismatch(
                f"module `{leaves.module}` is quantized in the files, with {listed(leaves.entries)}"
                f", but the quantization config does not say how, in `{self.checkpoint.name}`",
                hint=f"the config has no `weight` for it in `{says.entry}`",
            )
        return describe(
            leaves, layer, decided_by=says.entry, is_reordered=self._config.is_reordered
        )

    def decode(self, weight: SourceWeight) -> QuantTensor | Tensor:
        """Read a weight [N, K]: canonical if it is quantized, else float."""
        if weight.scheme is None:
            return self.checkpoint.read(weight.leaves["weight"])
        _, layer = self._config.of_module(weight.module)
        assert layer.weight is not None, "described by this config"
        return read_weight(
            self.checkpoint, weight, layer.weight, is_reordered=self._config.is_reordered
        )


def _with_usual_leaves(checkpoint: Checkpoint) -> Checkpoint:
    """Return the checkpoint with the leaves of older exports under their present names."""
    names = {}
    for name in checkpoint.tensors:
        parts = name.rsplit(".", 2)
        leaf = _RENAMED.get(".".join(parts[1:])) if len(parts) == 3 else None
        if leaf is not None:
            names[name] = f"{parts[0]}.{leaf}"
    return checkpoint.renamed(names) if names else checkpoint
