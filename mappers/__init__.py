"""Names only: which module a checkpoint tensor belongs to, which modules form one fused layer."""
