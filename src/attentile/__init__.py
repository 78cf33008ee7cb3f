"""Exact transformer attention for NumPy arrays at the speed of the CPU."""

from typing import TYPE_CHECKING

from .attention import attention, attention_partial
from .backward import AttentionGradients, attention_backward, attention_vjp
from .cache import KVCache
from .inspection.draw import draw_mask
from .inspection.explain import Explanation, explain
from .inspection.stats import AttentionStats, attention_stats
from .layers.multi_head import MultiHeadAttention
from .masks import segment_ids
from .merge import merge_attention
from .outputs import AttentionResult
from .partial import Partial
from .positions import (
    alibi_slopes,
    positional_encoding,
    relative_bias,
    relative_bias_backward,
    rotary_embedding,
    t5_bias,
    t5_bias_backward,
    t5_buckets,
)
from .runtime.backend import use_backend
from .runtime.config import show_config
from .runtime.threadpools import introduce as _introduce
from .runtime.threads import get_num_threads, num_threads, set_num_threads
from .textbook import causal_attention, multi_head_attention, self_attention

__all__ = [
    "AttentionGradients",
    "AttentionResult",
    "AttentionStats",
    "Explanation",
    "KVCache",
    "MultiHeadAttention",
    "Partial",
    "alibi_slopes",
    "attention",
    "attention_backward",
    "attention_partial",
    "attention_stats",
    "attention_vjp",
    "causal_attention",
    "draw_mask",
    "explain",
    "get_num_threads",
    "merge_attention",
    "multi_head_attention",
    "num_threads",
    "positional_encoding",
    "relative_bias",
    "relative_bias_backward",
    "rotary_embedding",
    "segment_ids",
    "self_attention",
    "set_num_threads",
    "show_config",
    "t5_bias",
    "t5_bias_backward",
    "t5_buckets",
    "use_backend",
]

_introduce()


if TYPE_CHECKING:
    __version__: str
else:

    def __getattr__(name):
        """__version__, looked up when it is asked for: to read it takes as long as to import all the rest."""
        if name == "__version__":
            from .runtime.config import version

            return version()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
