"""Tools for tests of a backend: cases and their inputs, the oracle, error budgets, poisoned memory.

The truth is `kernels.reference.recurrence` in fp64 on exactly the values that the backend gets (16-bit inputs are
rounded first). The yardstick is the same recurrence in the working dtype, on the device of the backend, whose exp and
sums it shares. No backend may be more than twice as wrong as that plus one rounding of the dtype.

    from kda_layers.testing import cases, oracle
    case = cases.Case(T=200, gate="softplus")
    oracle.check_backend(case, "eager", "cpu")
"""
