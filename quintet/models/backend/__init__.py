"""The Transformers backend: a causal model runs through transformers' own modeling code, on our cache and layers."""

from quintet.models.backend.model import Model

__all__ = ["Model"]
