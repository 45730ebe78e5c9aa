"""The backward: a reverse scan over chunks, then the gradients of every chunk."""
