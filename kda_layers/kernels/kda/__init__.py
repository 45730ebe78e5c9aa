"""Kimi Delta Attention: the operators `kda` and `kda_step`, their definition, contract and backends."""
