"""A linear layer of a decode step, with the norm before it and the sum or the activation after it."""
