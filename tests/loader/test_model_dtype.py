"""The dtype that a config.json states, wherever it stands."""

import pytest
import torch

from quantload.loader.model_dtype import config_dtype


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "torch.float32"}, torch.float32),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ({"text_config": {"torch_dtype": "torch.float16"}}, torch.float16),
        ({}, None),
        ({"dtype": "nonsense"}, None),
        ({"dtype": "int8"}, None),  # a dtype of torch, but none in which a model runs
        ({"dtype": ["bfloat16"], "text_config": 5}, None),
    ],
)
def test_config_dtype(config, expected):
    assert config_dtype(config) == expected
