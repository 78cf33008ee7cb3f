# The job of one call, and what a thread holds while it works on it: a block of rows, and what blocks share. The story
# is told in _pass.pxi. Included by _core.pyx.

cdef enum:
    ROW_BUFFERS = 4                             # of Block: m, l, slope, position
    MAX_BLOCKS = 8                              # blocks of rows that share one visit of a chunk
    TASK_ROWS = 192                             # rows that share it if there are tasks enough for all threads
    APART_BYTES = 1024                          # from row to row of keys that are gathered into scratch, at least,
    GATHER_BLOCKS = 3                           #   and blocks that use them then
    WORDS = AT_CHUNK // AT_WORD
    MAX_THREADS = 256                           # of one call
    TASKS_PER_THREAD = 8                        # fewer blocks per task rather than fewer tasks than this
    FEW_TASKS_PER_THREAD = 4                    # few rows: heads are shared among threads below this
    MAX_TOGETHER = 256                          # heads that are read together: each has a block in the scratch
    AHEAD = 16                                  # keys further on that are fetched where tokens' heads lie side by side
    MAX_SPLITS = 1 << 20                        # chunks of all heads, if they are: 2^28 keys; more is a repeating view
    NONE = 0                                    # kinds of a mask word over the rows of a block
    MIXED = 1
    ALL = 2

cdef Py_ssize_t FAR = 1 << 60                   # beyond any key; positions are clipped to it so that sums cannot wrap
# Smaller arrays are taken to be in the caches already, where fetching ahead only costs (about 1 % of the pass).
cdef Py_ssize_t FETCH_BYTES = 4 << 20
cdef Py_ssize_t FEW_FETCH_BYTES = 12 << 20      # a single reading, from L3 as fast as fetched: 82 against 72 GB/s
# Below this much work (about 40 us of one core) waking a second thread costs more than it gives. Few rows take their
# time for reading keys and values.
cdef double SERIAL_FLOPS = 4e6
cdef double SERIAL_BYTES = 2e6

cdef struct Strided:
    char *data                                  # element [0, 0, 0, 0]; NULL if the array is not there
    Py_ssize_t batch, head, row, column         # bytes

# A row that is not finished, see kernels.h: its largest score m, the sum l of exp2(score - m), the sum o of the values
# with these weights.
cdef struct Partial:
    Strided m, l                                # [query]
    Strided o                                   # [query][value width]

# One integer per batch item; data is NULL if there is none.
cdef struct Index:
    char *data                                  # Py_ssize_t
    Py_ssize_t batch                            # bytes

# Which keys a row may see by its position alone: see interval_of().
cdef struct Structure:
    bint some                                   # a row may see less than all keys
    bint causal
    bint from_end                               # without `first`: the last query stands at the last valid key
    Py_ssize_t left, right                      # window around the position; FAR: unlimited
    Index first                                 # position of query 0; none: 0, or from_end
    Index lengths                               # valid keys; none: all
    Index prefixes                              # first keys that a causal row sees in any case; none: 0
    Strided lo, hi                              # [row] intervals besides all this (packed segments); NULL: none
    Py_ssize_t kept                             # every row sees the first `kept` keys, whatever its lo (not its hi)
    bint mask_in_rows                           # the mask is the same for all rows: one run of keys is an interval

cdef struct Job:
    const at_tiles *tiles
    Strided q, k, v, out, mask, bias, weights, lse
    int q_format, k_format, v_format            # AT_F32 ...; what is not in that of the tiles is widened
    int out_format, bias_format                 #   (_storage.pxi), the output narrowed, a bias converted (_bias.pxi)
    Partial before                              # where rows go on from; NULL: from nothing
    Partial after                               # where they are left
    Strided total                               # [query] double: l with more digits, for statistics; NULL: not wanted
    Structure structure
    Py_ssize_t batch, kv_heads, group, queries, keys, width, value_width
    const double *slopes                        # [query head] of ALiBi, NULL: none
    const double *sinks                         # [query head] logits, NULL: none
    double softcap                              # 0: none
    bint k_apart, v_apart                       # rows lie so far apart that a task gathers those of a chunk first
    bint fetch                                  # the arrays are larger than the caches: fetch rows ahead
    double factor, fill                         # scale * log2(e); score of an excluded key
    bint filling                                # fill is finite: excluded keys take part with that score
    Py_ssize_t block_rows, blocks_per_task, tasks_per_head, tasks
    char *scratch
    Py_ssize_t scratch_per_slot, block_bytes
    # A cache: the keys of each chunk as panels on a page, whose values lie value_offset bytes after its start.
    Py_ssize_t key_step                         # elements between the widths of a key: 1, in panels AT_PANEL
    const Py_ssize_t *pages                     # [batch][chunk] address of the page; NULL: k and v are arrays
    Py_ssize_t pages_batch, value_offset
    # Few rows (_few.pxi)
    bint few                                    # all rows of a head are one block for the tiles with lanes = keys
    Py_ssize_t few_pitch                        # elements of a row of values in scratch
    int few_k_format, few_v_format              # those in which the tiles get keys and values
    bint together                               # a token's heads lie side by side: all of them, chunk after chunk;
    Py_ssize_t heads_per_task                   #   or those that a task takes one after the other,
    Py_ssize_t splits                           #   or tasks that share the chunks of one head,
    char *partials                              #   which leave [head][chunk] partial results here
    Py_ssize_t partial_bytes, partials_per_head

cdef struct Item:                               # what `structure` holds of one batch item
    Py_ssize_t first, length, prefix

cdef struct PartialRows:
    char *m[AT_MAX_ROWS]
    char *l[AT_MAX_ROWS]
    char *o[AT_MAX_ROWS]

# One block of rows during a task. All buffers lie in the slot's scratch; pitch = vectors * lanes.
cdef struct Block:
    Py_ssize_t n_rows, pitch
    int vectors
    bint first                                  # no chunk was visited yet: ot holds nothing
    bint excludes                               # some visited key was excluded for some row
    bint masked                                 # the mask is looked at: it is there and no interval
    Py_ssize_t lo, hi, all_lo, all_hi           # seen by some row: [lo, hi); by all rows: [all_lo, all_hi)
    Py_ssize_t gap_end                          # seen by none: [kept, gap_end)
    char *qt
    char *ot
    char *m
    char *l
    char *slope                                 # [pitch] of each row, in units of log2(e)
    char *position                              # [pitch] of each row, relative to the first key of a run
    double *total                               # [pitch] l with more digits
    char *maxima                                # [chunk][pitch] maximum of each chunk, if weights are wanted
    Py_ssize_t row_position[AT_MAX_ROWS]
    double row_sink[AT_MAX_ROWS]
    Py_ssize_t row_lo[AT_MAX_ROWS]
    Py_ssize_t row_hi[AT_MAX_ROWS]
    const char *q_rows[AT_MAX_ROWS]
    const char *mask_rows[AT_MAX_ROWS]
    const char *bias_rows[AT_MAX_ROWS]
    char *out_rows[AT_MAX_ROWS]
    char *weight_rows[AT_MAX_ROWS]
    char *lse_rows[AT_MAX_ROWS]
    char *total_rows[AT_MAX_ROWS]
    PartialRows before                          # where the rows go on from, and are left
    PartialRows after

# What the blocks of a task use one after the other.
cdef struct Shared:
    char *st                                    # [AT_CHUNK][pitch] scores, then weights
    char *block_max                             # [pitch] each: maximum of the scores of the chunk,
    char *unused                                #   a place for maxima that a later step replaces,
    char *alpha                                 #   weights of the old and the new part,
    char *beta
    char *capped                                # [AT_CHUNK][pitch] scores after softcap, if they are wanted
    uint32_t *words                             # [WORDS][pitch]
    int kinds[WORDS]
    at_ahead ahead[3]                           # what the next scores fetch meanwhile
    int n_ahead
    char *keys                                  # [AT_CHUNK] rows of keys and of values, if they are widened
    char *wide_values
    char *rows                                  # [row] of queries or results, if these are
    char *bias                                  # [row][AT_CHUNK] if it is converted
    const char *bias_rows[AT_MAX_ROWS]          # those of the keys at work
    char *panels                                # few rows: AT_FEW_KEYS keys,
    char *sum                                   #   [pitch] sums of the weights of a chunk
    double *total                               #   [pitch] and these with more digits
    char *values                                #   [row][few_pitch] and values of a chunk


cdef inline Py_ssize_t aligned(Py_ssize_t nbytes) noexcept nogil:
    return (nbytes + AT_ALIGN - 1) // AT_ALIGN * AT_ALIGN


cdef inline Py_ssize_t chunks_before(Py_ssize_t key) noexcept nogil:
    """How many chunks start before this key."""
    return (key + AT_CHUNK - 1) // AT_CHUNK


cdef inline double real_at(const char *p, size_t itemsize) noexcept nogil:
    return (<const double *> p)[0] if itemsize == 8 else <double> (<const float *> p)[0]


cdef inline void set_real(char *p, size_t itemsize, double x) noexcept nogil:
    if itemsize == 8:
        (<double *> p)[0] = x
    else:
        (<float *> p)[0] = <float> x


cdef inline void fill_reals(char *p, size_t itemsize, Py_ssize_t n, double x) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        set_real(p + i * <Py_ssize_t> itemsize, itemsize, x)


cdef inline int own_format(const Job *job) noexcept nogil:
    return AT_F32 if job.tiles.itemsize == sizeof(float) else AT_F64


cdef inline bint brings_keys(const Job *job) noexcept nogil:
    """Whether chunks of keys are brought into scratch: to widen them, or because their rows lie far apart."""
    return job.k_format != own_format(job) or job.k_apart


cdef inline bint brings_values(const Job *job) noexcept nogil:
    return job.v_format != own_format(job) or job.v_apart


cdef inline bint widens_rows(const Job *job) noexcept nogil:
    return job.q_format != own_format(job) or job.out_format != own_format(job)


cdef inline Py_ssize_t chunk_keys(const Job *job, Py_ssize_t c) noexcept nogil:
    return min(<Py_ssize_t> AT_CHUNK, job.keys - c * AT_CHUNK)


cdef inline const char *key_chunk(const Job *job, Py_ssize_t b, Py_ssize_t head, Py_ssize_t c) noexcept nogil:
    """The first key of a chunk, of which job.k.row bytes further is the next (of panels: 16 of them the next panel)."""
    if job.pages == NULL:
        return job.k.data + b * job.k.batch + head * job.k.head + c * AT_CHUNK * job.k.row
    return <const char *> job.pages[b * job.pages_batch + c] + head * job.k.head


cdef inline const char *value_chunk(const Job *job, Py_ssize_t b, Py_ssize_t head, Py_ssize_t c) noexcept nogil:
    if job.pages == NULL:
        return job.v.data + b * job.v.batch + head * job.v.head + c * AT_CHUNK * job.v.row
    return <const char *> job.pages[b * job.pages_batch + c] + job.value_offset + head * job.v.head


cdef inline char *at(const Strided *a, Py_ssize_t b, Py_ssize_t h, Py_ssize_t i) noexcept nogil:
    return a.data + b * a.batch + h * a.head + i * a.row
