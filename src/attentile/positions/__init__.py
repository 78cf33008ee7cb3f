"""Where tokens stand: encodings, biases and rotations by position."""

from .biases import alibi_slopes, relative_bias, relative_bias_backward, t5_bias, t5_bias_backward, t5_buckets
from .rotary import rotary_embedding
from .sinusoids import positional_encoding

__all__ = [
    "alibi_slopes",
    "positional_encoding",
    "relative_bias",
    "relative_bias_backward",
    "rotary_embedding",
    "t5_bias",
    "t5_bias_backward",
    "t5_buckets",
]
