"""The numbers of kernels/kernels.h that Python counts with.

The header is their source. They stand here once more because an installation without the compiled core needs them too;
a test compares them with those that the core was compiled with.
"""

ALIGN = 64  # bytes: pages of a cache start at a multiple
CHUNK = 256  # keys per chunk of the fused pass, and tokens per page of a cache
LOG2E = 1.4426950408889634  # the kernels count scores in powers of 2
MIN_POWER = {4: -100, 8: -960}  # by item size: a weight below 2 to this power counts 0
PANEL = 16  # keys per panel of a page: one AVX-512 vector of float32
