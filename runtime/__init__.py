"""Speed: kernels, the choice among them, generation. Takes any callable model."""
