"""A loaded model against a plain transformers model that holds the same weights."""

import torch
from safetensors.torch import load_file

import quantload
from quantload.loader.formats import open_source
from quantload.loader.open import open_checkpoint
from quantload.quant.qtensor import QuantTensor


def logits_errors(folder):
    """Relative L2 errors of the logits of a checkpoint that is loaded in float32.

    Returns:
        Against a transformers model in float32 that holds the dequantized weights, and against the
        logits that the producer computed in a narrower dtype.
    """
    recorded = load_file(folder / "expected.safetensors")
    loaded = quantload.load(folder, device="cpu", dtype=torch.float32, quantize_inputs=False)
    found = _logits(loaded, recorded["input_ids"])
    expected = _logits(plain_model(open_source(open_checkpoint(folder))), recorded["input_ids"])
    return _error(found, expected), _error(found, recorded["logits"])


def plain_model(source):
    """A transformers model in float32, made without any code of ours but the weights."""
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds to import

    content = {k: v for k, v in source.checkpoint.config.items() if k != "quantization_config"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content)).float().eval()
    state = {name: source.read_plain(name).float() for name in source.plain}
    for module, weight in source.weights.items():
        value = source.read_weight(module)
        if isinstance(value, QuantTensor):
            value = value.dequantize()
        state[weight.parameter_name] = value.float()
    wanted = dict(model.named_parameters())
    for name in [n for n in wanted if n.endswith("experts.gate_up_proj")]:
        experts = range(wanted[name].shape[0])
        prefix = name.removesuffix("gate_up_proj")
        parts = [
            [state.pop(f"{prefix}{e}.{part}_proj.weight") for e in experts]
            for part in ("gate", "up", "down")
        ]
        pairs = zip(parts[0], parts[1], strict=True)
        state[name] = torch.stack([torch.cat(pair) for pair in pairs])
        state[f"{prefix}down_proj"] = torch.stack(parts[2])
    if content.get("tie_word_embeddings"):
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    missing = model.load_state_dict(state, strict=False).missing_keys
    assert not missing, missing
    return model


def _logits(model, input_ids):
    with torch.no_grad():
        return model(input_ids).logits.float()


def _error(found, expected):
    return float((found - expected.float()).norm() / expected.float().norm())
