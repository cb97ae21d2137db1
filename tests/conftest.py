"""Seeds and settings for all tests."""

import os
import random

import numpy
import pytest
import torch
from hypothesis import settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

settings.register_profile("default", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None, max_examples=3000)  # before a release, by hand
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def seeds():
    """Give every test the same random numbers, in whatever order the tests run."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where there is a card, what else runs in Triton's interpreter is one of the tests for it."""
    if torch.cuda.is_available():
        for item in items:
            if "kernel_device" in item.fixturenames:
                item.add_marker(pytest.mark.gpu)
