"""The key-value cache of a decoder."""

from .kv_cache import KVCache

__all__ = ["KVCache"]
