"""KDA operators: the contract, the choice of a backend, the public functions, and the backends themselves."""
