"""Tests whose oracle is newer than the oldest transformers that is supported."""

import pytest
import transformers
from packaging.version import Version

IS_OLD = Version(transformers.__version__) < Version("5.24")
needs_new_transformers = pytest.mark.skipif(
    IS_OLD, reason=f"the oracle is transformers 5.24, found {transformers.__version__}"
)
