"""The KDA layer, its cache, and a language model made of it."""
