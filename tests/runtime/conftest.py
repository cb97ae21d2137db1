"""Where the tests of Triton kernels run: the card if there is one, else Triton's interpreter."""

import pytest
import torch


@pytest.fixture(scope="module")
def kernel_device():
    """The device for kernels; on a CPU, kernel modules must be imported inside the test."""
    if torch.cuda.is_available():
        yield torch.device("cuda")
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_scalars_too(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    with pytest.MonkeyPatch.context() as patch:
        # Only while these tests run: elsewhere, the choice of a kernel must not see it.
        patch.setenv("TRITON_INTERPRET", "1")
        # Loop bounds of a kernel fail with numpy 2.4 before Triton 3.7:
        # https://github.com/triton-lang/triton/issues/9171
        patch.setattr(interpreter, "_patch_lang_tensor", patch_scalars_too)
        yield torch.device("cpu")
