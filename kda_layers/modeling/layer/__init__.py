"""The KDA layer, its states and its decode step."""

from .layer import KimiDeltaAttention as KimiDeltaAttention
