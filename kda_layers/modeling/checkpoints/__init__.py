"""Weights of KDA layers and models in the names and files of other families."""
