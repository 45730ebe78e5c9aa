"""RMSNorm times a sigmoid gate."""
