# The fused pass: scores, mask, softmax and values of one block of query rows, chunk by chunk of keys.
#
#     for each task = (batch b, key head h, up to MAX_BLOCKS blocks of query rows)      one thread, own scratch
#         pack      the blocks of Q                                                     once
#         for each chunk of 256 keys that some row may see:                             K, V chunk stays in L2
#             for each block:
#                 scores, bias, exclusion, softmax, values                              C tiles, S stays in L1/L2
#         unpack    the blocks of O
#
# Why blocked this way: a row of K or V is used by every query row, so a chunk of K and V (2 x 256 x 64 floats: 128 KiB)
# is read from memory once per task and from L2 once per block; the scores (256 x 48 floats: 48 KiB) never leave the
# core; Q and O of a block (2 x 48 x 64 floats: 24 KiB) stay in L1. Memory traffic per task is K + V + its part of Q and O,
# where the textbook formula writes and reads the L x S matrix four times.
#
# Query heads that share a key head (grouped-query attention) are simply more rows of the same keys: row r of a task
# is query r % L of head r // L of the group.
#
# Which keys a row may see is first an interval lo <= j < hi (causal, lengths, windows), then a boolean mask, then the
# -inf entries of a bias. Chunks that no row of a task sees are never visited. Where an interval ends inside a chunk,
# or where there is a mask, the block's rows become bit words, 32 keys each: a word that is 0 for all rows is skipped, one
# that is all ones runs the plain tiles, only the mixed ones test lanes.
#
# Everything here is dtype-blind: it moves byte pointers, the tiles know the type.
# Order of operations and layouts: kernels/kernels.h.
#
# Included by _core.pyx, which holds the imports and the entry functions.

cdef enum:
    MAX_BLOCKS = 8                              # blocks of rows that share one visit of a chunk
    TASK_ROWS = 192                             # rows that share it if there are tasks enough for all threads
    MAX_ROWS = 48                               # AT_MAX_VECTORS * the most lanes of any ISA
    WORDS = AT_CHUNK // AT_WORD
    TASKS_PER_THREAD = 8                        # fewer blocks per task rather than fewer tasks than this
    NONE = 0                                    # kinds of a mask word over the rows of a block
    MIXED = 1
    ALL = 2

cdef double LOG2E = 1.4426950408889634074
cdef double LN2 = 0.69314718055994530942
# Below this many FLOPs (about 40 us of one core) waking a second thread costs more than it gives.
cdef double SERIAL_FLOPS = 4e6

cdef struct Strided:
    char *data                                  # element [0, 0, 0, 0]; NULL if the array is not there
    Py_ssize_t batch, head, row, column         # bytes

cdef struct Job:
    const at_tiles *tiles
    Strided q, k, v, out, mask, bias, weights, lse
    const Py_ssize_t *lo                        # [batch][row], keys a row may see; NULL: all
    const Py_ssize_t *hi
    Py_ssize_t interval_batch                   # elements between batches of lo and hi, 0 if they share one
    Py_ssize_t batch, kv_heads, group, queries, keys, width, value_width
    const Py_ssize_t *start                     # [batch] position of query 0; needed by slopes
    Py_ssize_t start_batch                      # 1, or 0 if the items share it
    const double *slopes                        # [query head] of ALiBi, NULL: none
    const double *sinks                         # [query head] logits, NULL: none
    double softcap                              # 0: none
    double factor, fill                         # scale * log2(e); score of an excluded key
    bint filling                                # fill is finite: excluded keys take part with that score
    Py_ssize_t block_rows, blocks_per_task, tasks_per_head, tasks
    char *scratch
    Py_ssize_t scratch_per_slot, block_bytes

# One block of rows during a task. All buffers lie in the slot's scratch; pitch = vectors * lanes.
cdef struct Block:
    Py_ssize_t n_rows, pitch
    int vectors
    bint first                                  # no chunk was visited yet: ot holds nothing
    bint excludes                               # some visited key was excluded for some row
    Py_ssize_t lo, hi, all_lo, all_hi           # seen by some row: [lo, hi); by all rows: [all_lo, all_hi)
    char *qt
    char *ot
    char *m
    char *l
    char *slope                                 # [pitch] of each row, in units of log2(e)
    char *position                              # [pitch] of each row, relative to the first key of a run
    char *tops                                  # [chunk][pitch] maximum of each chunk, if weights are wanted
    Py_ssize_t row_position[MAX_ROWS]
    double row_sink[MAX_ROWS]
    Py_ssize_t row_lo[MAX_ROWS]
    Py_ssize_t row_hi[MAX_ROWS]
    const char *q_rows[MAX_ROWS]
    const char *mask_rows[MAX_ROWS]
    const char *bias_rows[MAX_ROWS]
    char *out_rows[MAX_ROWS]
    char *weight_rows[MAX_ROWS]
    char *lse_rows[MAX_ROWS]

# What the blocks of a task use one after the other.
cdef struct Shared:
    char *st                                    # [AT_CHUNK][pitch] scores, then weights
    char *top                                   # [pitch] each: running maximum of the chunk,
    char *unused                                #   a place for maxima that a later step replaces,
    char *alpha                                 #   weights of the old and the new part,
    char *beta
    uint32_t *words                             # [WORDS][pitch]
    int kinds[WORDS]


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


cdef inline char *at(const Strided *a, Py_ssize_t b, Py_ssize_t h, Py_ssize_t i) noexcept nogil:
    return a.data + b * a.batch + h * a.head + i * a.row


# ---------------------------------------------------------------------------------------------------------------
# Division of work and scratch
# ---------------------------------------------------------------------------------------------------------------
cdef void divide(Job *job, int threads) noexcept nogil:
    """Sets the block and task sizes: TASK_ROWS rows share a visit of a chunk unless threads would be short of tasks."""
    cdef Py_ssize_t rows = job.group * job.queries, heads = job.batch * job.kv_heads, blocks, share
    job.block_rows = job.tiles.max_vectors * job.tiles.lanes
    blocks = (rows + job.block_rows - 1) // job.block_rows
    share = min(<Py_ssize_t> MAX_BLOCKS, (TASK_ROWS + job.block_rows - 1) // job.block_rows)
    if threads > 1:
        share = max(<Py_ssize_t> 1, min(share, heads * blocks // (TASKS_PER_THREAD * threads)))
    job.tasks_per_head = (blocks + share - 1) // share
    job.blocks_per_task = (blocks + job.tasks_per_head - 1) // job.tasks_per_head
    job.tasks_per_head = (blocks + job.blocks_per_task - 1) // job.blocks_per_task
    job.tasks = heads * job.tasks_per_head


cdef void size_scratch(Job *job) noexcept nogil:
    """The order here is the order in which place_block and attend_task hand the bytes out."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = min(job.block_rows, max_pitch(job))
    cdef Py_ssize_t chunks = chunks_before(job.keys) if job.weights.data != NULL else 0
    job.block_bytes = (aligned(sizeof(Block)) + aligned(rows * job.width * item)
                       + aligned(rows * job.value_width * item) + (4 + chunks) * aligned(rows * item))
    job.scratch_per_slot = (aligned(sizeof(Shared)) + aligned(AT_CHUNK * rows * item) + 4 * aligned(rows * item)
                            + aligned(WORDS * rows * sizeof(uint32_t)) + job.blocks_per_task * job.block_bytes)


cdef inline Py_ssize_t max_pitch(const Job *job) noexcept nogil:
    cdef Py_ssize_t rows = job.group * job.queries
    return (rows + job.tiles.lanes - 1) // job.tiles.lanes * job.tiles.lanes


cdef inline char *take(char **free_bytes, Py_ssize_t nbytes) noexcept nogil:
    cdef char *p = free_bytes[0]
    free_bytes[0] = p + aligned(nbytes)
    return p


# ---------------------------------------------------------------------------------------------------------------
# A block: which rows, which keys they may see
# ---------------------------------------------------------------------------------------------------------------
cdef void point_rows(const Job *job, const char **rows, const Strided *array, Py_ssize_t b, Py_ssize_t head,
                     Py_ssize_t i, Py_ssize_t n) noexcept nogil:
    """rows[r] = row r of the block in this array: query i + r of the head, running on into the next heads."""
    cdef Py_ssize_t r
    cdef const char *p
    if array.data == NULL:
        return
    p = at(array, b, head, i)
    for r in range(n):
        rows[r] = p
        p += array.row
        i += 1
        if i == job.queries:
            head, i = head + 1, 0
            p = at(array, b, head, 0)


cdef void find_intervals(const Job *job, Block *block, Py_ssize_t b, Py_ssize_t i) noexcept nogil:
    """Which keys the rows may see by lo and hi: each, any and all of them. i: query of row 0."""
    cdef Py_ssize_t r
    block.lo, block.hi, block.all_lo, block.all_hi = 0, job.keys, 0, job.keys
    if job.lo == NULL:
        for r in range(block.n_rows):
            block.row_lo[r], block.row_hi[r] = 0, job.keys
        return
    block.lo, block.hi = job.keys, 0
    for r in range(block.n_rows):
        block.row_lo[r] = job.lo[b * job.interval_batch + i]
        block.row_hi[r] = job.hi[b * job.interval_batch + i]
        block.all_lo = max(block.all_lo, block.row_lo[r])
        block.all_hi = min(block.all_hi, block.row_hi[r])
        if block.row_lo[r] < block.row_hi[r]:
            block.lo = min(block.lo, block.row_lo[r])
            block.hi = max(block.hi, block.row_hi[r])
        i = i + 1 if i + 1 < job.queries else 0


cdef void find_head_scalars(const Job *job, Block *block, Py_ssize_t b, Py_ssize_t head, Py_ssize_t i) noexcept nogil:
    """What a row has from its head and position: ALiBi slope, sink. i: query of row 0."""
    cdef Py_ssize_t r, item = <Py_ssize_t> job.tiles.itemsize
    if job.slopes == NULL and job.sinks == NULL:
        return
    if job.slopes != NULL:
        fill_reals(block.slope, item, block.pitch, 0)
    for r in range(block.n_rows):
        if job.slopes != NULL:
            block.row_position[r] = job.start[b * job.start_batch] + i
            set_real(block.slope + r * item, item, job.slopes[head] * LOG2E)
        if job.sinks != NULL:
            block.row_sink[r] = job.sinks[head] * LOG2E
        i += 1
        if i == job.queries:
            head, i = head + 1, 0


cdef void open_block(const Job *job, Block *block, char *free_bytes, Py_ssize_t b, Py_ssize_t kv_head,
                     Py_ssize_t start) noexcept nogil:
    """Rows start .. start + n_rows of key head kv_head: pointers, intervals, packed queries."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, head, i
    block.n_rows = min(job.block_rows, job.group * job.queries - start)
    block.vectors = <int> ((block.n_rows + job.tiles.lanes - 1) // job.tiles.lanes)
    block.pitch = block.vectors * job.tiles.lanes
    block.qt = take(&free_bytes, block.pitch * job.width * item)
    block.ot = take(&free_bytes, block.pitch * job.value_width * item)
    block.m = take(&free_bytes, block.pitch * item)
    block.l = take(&free_bytes, block.pitch * item)
    block.slope = take(&free_bytes, block.pitch * item)
    block.position = take(&free_bytes, block.pitch * item)
    block.tops = free_bytes
    head, i = kv_head * job.group + start // job.queries, start % job.queries
    point_rows(job, block.q_rows, &job.q, b, head, i, block.n_rows)
    point_rows(job, <const char **> block.out_rows, &job.out, b, head, i, block.n_rows)
    point_rows(job, block.mask_rows, &job.mask, b, head, i, block.n_rows)
    point_rows(job, block.bias_rows, &job.bias, b, head, i, block.n_rows)
    point_rows(job, <const char **> block.weight_rows, &job.weights, b, head, i, block.n_rows)
    point_rows(job, <const char **> block.lse_rows, &job.lse, b, head, i, block.n_rows)
    find_intervals(job, block, b, i)
    find_head_scalars(job, block, b, head, i)
    job.tiles.pack(block.qt, block.q_rows, block.n_rows, block.vectors, job.width, job.factor)


cdef void start_rows(const Job *job, Block *block) noexcept nogil:
    """No key seen yet: m = -inf, l = 0; ot is written by the first chunk."""
    block.first = True
    block.excludes = False
    fill_reals(block.m, job.tiles.itemsize, block.pitch, -INFINITY)
    fill_reals(block.l, job.tiles.itemsize, block.pitch, 0)


cdef inline uint32_t interval_word(Py_ssize_t lo, Py_ssize_t hi) noexcept nogil:
    """Bits lo .. hi - 1, both relative to the word."""
    lo = min(max(lo, 0), AT_WORD)
    hi = min(max(hi, lo), AT_WORD)
    return <uint32_t> ((1ULL << hi) - (1ULL << lo))


cdef inline void move_rows(const char **rows, Py_ssize_t n, Py_ssize_t offset) noexcept nogil:
    cdef Py_ssize_t r
    for r in range(n):
        rows[r] += offset


cdef void build_words(const Job *job, Block *block, Shared *shared, Py_ssize_t chunk, Py_ssize_t n) noexcept nogil:
    """Words and their kinds for the keys chunk .. chunk + n. Lanes beyond n_rows get 0 and do not count."""
    cdef Py_ssize_t w, r, words = (n + AT_WORD - 1) // AT_WORD
    cdef uint32_t some, every, full, word
    cdef uint32_t *row
    if job.mask.data != NULL:
        move_rows(block.mask_rows, block.n_rows, chunk * job.mask.column)
        at_mask_words(shared.words, block.mask_rows, job.mask.column, block.n_rows, block.pitch, n)
        move_rows(block.mask_rows, block.n_rows, -chunk * job.mask.column)
    for w in range(words):
        row = shared.words + w * block.pitch
        full = interval_word(0, n - w * AT_WORD)
        some, every = 0, full
        for r in range(block.n_rows):
            word = full if job.mask.data == NULL else row[r]
            if job.lo != NULL:
                word &= interval_word(block.row_lo[r] - chunk - w * AT_WORD, block.row_hi[r] - chunk - w * AT_WORD)
            row[r] = word
            some |= word
            every &= word
        memset(row + block.n_rows, 0, (block.pitch - block.n_rows) * sizeof(uint32_t))
        shared.kinds[w] = ALL if every == full else (MIXED if some or job.filling else NONE)


# ---------------------------------------------------------------------------------------------------------------
# One chunk of keys
# ---------------------------------------------------------------------------------------------------------------
cdef void score_run(const Job *job, Block *block, Shared *shared, const char *k, Py_ssize_t chunk, Py_ssize_t start,
                    Py_ssize_t stop, int kind) noexcept nogil:
    """Final scores of the keys chunk + start .. chunk + stop, and their maximum in shared.top.

    Every step leaves a maximum; only that of the last one counts, the others go to shared.unused.
    """
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t n = stop - start
    cdef char *st = shared.st + start * block.pitch * <Py_ssize_t> tiles.itemsize
    cdef int steps = (job.softcap != 0) + (job.bias.data != NULL) + (job.slopes != NULL) + (kind == MIXED)
    if kind == NONE:
        fill_reals(st, tiles.itemsize, n * block.pitch, -INFINITY)
        return
    tiles.scores[block.vectors - 1](st, shared.unused if steps else shared.top, block.qt,
                                    k + (chunk + start) * job.k.row, job.k.row, job.width, n)
    if job.softcap != 0:
        steps -= 1
        tiles.softcap(st, shared.unused if steps else shared.top, block.vectors, n, -2 / job.softcap,
                      job.softcap * LOG2E)
    if job.bias.data != NULL:
        steps -= 1
        move_rows(block.bias_rows, block.n_rows, (chunk + start) * job.bias.column)
        tiles.add_bias(st, shared.unused if steps else shared.top, block.bias_rows, job.bias.column, block.n_rows,
                       block.vectors, n)
        move_rows(block.bias_rows, block.n_rows, -(chunk + start) * job.bias.column)
    if job.slopes != NULL:
        steps -= 1
        place_rows(job, block, chunk + start)
        tiles.alibi(st, shared.unused if steps else shared.top, block.slope, block.position, block.vectors, n)
    if kind == MIXED:
        tiles.exclude(st, shared.top, shared.words + start // AT_WORD * block.pitch, block.vectors, n, job.fill)


cdef void place_rows(const Job *job, Block *block, Py_ssize_t key) noexcept nogil:
    """block.position: that of each row, counted from this key; exact in float up to 2^24 keys away."""
    cdef Py_ssize_t r, item = <Py_ssize_t> job.tiles.itemsize
    fill_reals(block.position, item, block.pitch, 0)
    for r in range(block.n_rows):
        set_real(block.position + r * item, item, <double> (block.row_position[r] - key))


cdef void visit(const Job *job, Block *block, Shared *shared, const char *k, const char *v, Py_ssize_t chunk,
                bint careful) noexcept nogil:
    """Adds the keys of one chunk that the block's rows may see."""
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t item = <Py_ssize_t> tiles.itemsize, start, stop, w, run
    cdef Py_ssize_t n = min(<Py_ssize_t> AT_CHUNK, job.keys - chunk)
    start = max(block.lo - chunk, 0) // AT_WORD * AT_WORD
    stop = min(block.hi - chunk, n)
    if start >= stop:
        return
    fill_reals(shared.top, item, block.pitch, -INFINITY)
    if job.mask.data == NULL and block.all_lo <= chunk + start and chunk + stop <= block.all_hi:
        score_run(job, block, shared, k, chunk, start, stop, ALL)
    else:
        build_words(job, block, shared, chunk, stop)
        while start < stop and shared.kinds[start // AT_WORD] == NONE:
            start += AT_WORD
        while start < stop and shared.kinds[(stop - 1) // AT_WORD] == NONE:
            stop = (stop - 1) // AT_WORD * AT_WORD
        if start >= stop:
            return
        run = start
        while run < stop:
            w = run // AT_WORD + 1
            while w * AT_WORD < stop and shared.kinds[w] == shared.kinds[run // AT_WORD]:
                w += 1
            if shared.kinds[run // AT_WORD] != ALL:
                block.excludes = True
            score_run(job, block, shared, k, chunk, run, min(w * AT_WORD, stop), shared.kinds[run // AT_WORD])
            run = w * AT_WORD
    weigh(job, block, shared, v, chunk, start, stop, careful)


cdef void weigh(const Job *job, Block *block, Shared *shared, const char *v, Py_ssize_t chunk, Py_ssize_t start,
                Py_ssize_t stop, bint careful) noexcept nogil:
    """Softmax and values of the keys chunk + start .. chunk + stop, whose scores are in shared.st."""
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t item = <Py_ssize_t> tiles.itemsize, r
    cdef char *st = shared.st + start * block.pitch * item
    tiles.softmax[block.vectors - 1](st, stop - start, shared.top, block.m, block.l, shared.alpha, shared.beta, careful)
    v += (chunk + start) * job.v.row
    if careful:
        tiles.values_marked(block.ot, st, v, job.v.row, job.value_width, stop - start, shared.alpha, shared.beta,
                            block.first, block.vectors)
    else:
        tiles.values[block.vectors - 1](block.ot, st, v, job.v.row, job.value_width, stop - start, shared.alpha,
                                        shared.beta, block.first)
    block.first = False
    if job.weights.data == NULL:
        return
    for r in range(block.pitch):
        set_real(block.tops + (chunk // AT_CHUNK * block.pitch + r) * item, item, real_at(shared.top + r * item, item))
    fill_reals(shared.unused, item, block.pitch, 1)
    move_rows(<const char **> block.weight_rows, block.n_rows, (chunk + start) * item)
    tiles.unpack(block.weight_rows, st, shared.unused, block.n_rows, block.vectors, stop - start)
    move_rows(<const char **> block.weight_rows, block.n_rows, -(chunk + start) * item)


# ---------------------------------------------------------------------------------------------------------------
# The end of a block
# ---------------------------------------------------------------------------------------------------------------
cdef bint sees_any_key(const Job *job, const Block *block, Py_ssize_t r) noexcept nogil:
    cdef Py_ssize_t j
    for j in range(block.row_lo[r], block.row_hi[r]):
        if job.mask.data != NULL and block.mask_rows[r][j * job.mask.column] == 0:
            continue
        if job.bias.data == NULL or real_at(block.bias_rows[r] + j * job.bias.column,
                                            job.tiles.itemsize) != -INFINITY:
            return True
    return False


cdef void finish_weights(const Job *job, Block *block) noexcept nogil:
    """Weights were stored relative to the maximum of their chunk; the final factor of each chunk is known now."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, r, c, at_row
    for r in range(block.n_rows):
        at_row = r * item
        for c in range(block.lo // AT_CHUNK, chunks_before(block.hi)):
            job.tiles.rescale(block.weight_rows[r] + c * AT_CHUNK * item,
                              min(<Py_ssize_t> AT_CHUNK, job.keys - c * AT_CHUNK),
                              real_at(block.tops + c * block.pitch * item + at_row, item),
                              real_at(block.m + at_row, item), real_at(block.l + at_row, item))


cdef void close_block(const Job *job, Block *block, Shared *shared) noexcept nogil:
    """O / l to the caller's layout; lse and weights if wanted."""
    cdef const at_tiles *tiles = job.tiles
    cdef Py_ssize_t item = <Py_ssize_t> tiles.itemsize, r
    if block.first:                             # no row sees any key
        memset(block.ot, 0, block.pitch * job.value_width * item)
    for r in range(block.n_rows):
        # l = 0: no key, or allowed ones that all score -inf; the softmax of the latter is NaN, not 0.
        if real_at(block.l + r * item, item) == 0 and sees_any_key(job, block, r):
            set_real(block.l + r * item, item, NAN)
        if job.lse.data != NULL:
            set_real(block.lse_rows[r], item,
                     (real_at(block.m + r * item, item) + log2(real_at(block.l + r * item, item))) * LN2)
        if job.sinks != NULL:                   # a sink is one more term of the sum, without a value
            set_real(block.l + r * item, item, real_at(block.l + r * item, item)
                     + exp2(block.row_sink[r] - real_at(block.m + r * item, item)))
    if job.weights.data != NULL:
        finish_weights(job, block)
    tiles.reciprocal(shared.alpha, block.l, block.vectors)
    tiles.unpack(block.out_rows, block.ot, shared.alpha, block.n_rows, block.vectors, job.value_width)


cdef void visit_chunks(const Job *job, Block **blocks, Py_ssize_t n_blocks, Shared *shared, const char *k,
                       const char *v, bint careful) noexcept nogil:
    """The loop over key chunks, from the first to the last that some row of the blocks sees."""
    cdef Py_ssize_t lo = job.keys, hi = 0, x, c
    for x in range(n_blocks):
        start_rows(job, blocks[x])
        if job.weights.data != NULL:
            fill_reals(blocks[x].tops, job.tiles.itemsize, chunks_before(job.keys) * blocks[x].pitch, -INFINITY)
        lo = min(lo, blocks[x].lo)
        hi = max(hi, blocks[x].hi)
    for c in range(lo // AT_CHUNK, chunks_before(hi)):
        for x in range(n_blocks):
            visit(job, blocks[x], shared, k, v, c * AT_CHUNK, careful)


cdef void attend_task(void *job_pointer, Py_ssize_t index, int slot) noexcept nogil:
    cdef const Job *job = <const Job *> job_pointer
    cdef Py_ssize_t heads = job.batch * job.kv_heads, item = <Py_ssize_t> job.tiles.itemsize
    cdef Py_ssize_t rows = min(job.block_rows, max_pitch(job)), part, head, b, start, x, n_blocks = 0
    cdef char *free_bytes = job.scratch + slot * job.scratch_per_slot
    cdef char *block_bytes
    cdef Shared *shared
    cdef Block *blocks[MAX_BLOCKS]
    if job.lo == NULL:                          # neighbours in time share a head's keys
        head, part = index // job.tasks_per_head, index % job.tasks_per_head
    else:                                       # rows may differ in work, usually more to the end: heavy ones first
        head, part = index % heads, job.tasks_per_head - 1 - index // heads
    b = head // job.kv_heads
    head %= job.kv_heads
    shared = <Shared *> take(&free_bytes, sizeof(Shared))
    shared.st = take(&free_bytes, AT_CHUNK * rows * item)
    shared.top = take(&free_bytes, rows * item)
    shared.unused = take(&free_bytes, rows * item)
    shared.alpha = take(&free_bytes, rows * item)
    shared.beta = take(&free_bytes, rows * item)
    shared.words = <uint32_t *> take(&free_bytes, WORDS * rows * sizeof(uint32_t))
    fill_reals(shared.unused, item, rows, 0)
    start = part * job.blocks_per_task * job.block_rows
    while n_blocks < job.blocks_per_task and start < job.group * job.queries:
        block_bytes = free_bytes + n_blocks * job.block_bytes
        blocks[n_blocks] = <Block *> take(&block_bytes, sizeof(Block))
        open_block(job, blocks[n_blocks], block_bytes, b, head, start)
        start += job.block_rows
        n_blocks += 1
    cdef const char *k = at(&job.k, b, head, 0)
    cdef const char *v = at(&job.v, b, head, 0)
    visit_chunks(job, blocks, n_blocks, shared, k, v, False)
    for x in range(n_blocks):
        # NaN here may be 0 * NaN or 0 * Inf from the value row of an excluded key: redo with those keys left out.
        if (not blocks[x].first and (blocks[x].excludes or job.bias.data != NULL) and not job.filling
                and job.tiles.any_nan(blocks[x].ot, blocks[x].vectors, job.value_width)):
            visit_chunks(job, &blocks[x], 1, shared, k, v, True)
        close_block(job, blocks[x], shared)
