"""RMSNorm of a residual stream after an addition to it."""
