# The job of one call, its division into tasks and blocks of rows, and the scratch of a thread. The story is told in
# _pass.pxi. Included by _core.pyx.

cdef enum:
    MAX_BLOCKS = 8                              # blocks of rows that share one visit of a chunk
    TASK_ROWS = 192                             # rows that share it if there are tasks enough for all threads
    WORDS = AT_CHUNK // AT_WORD
    TASKS_PER_THREAD = 8                        # fewer blocks per task rather than fewer tasks than this
    FEW_TASKS_PER_THREAD = 4                    # few rows: heads are shared among threads below this
    MAX_PARTIALS = 1 << 20                      # chunks of all heads, if they are: 2^28 keys; more is a repeating view
    NONE = 0                                    # kinds of a mask word over the rows of a block
    MIXED = 1
    ALL = 2

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

cdef struct Job:
    const at_tiles *tiles
    Strided q, k, v, out, mask, bias, weights, lse
    Strided state                               # [query][2] m and l of each row for a second pass, _stats.pxi
    const Py_ssize_t *lo                        # [batch][row], keys a row may see; NULL: all
    const Py_ssize_t *hi
    Py_ssize_t interval_batch                   # elements between batches of lo and hi, 0 if they share one
    Py_ssize_t batch, kv_heads, group, queries, keys, width, value_width
    const Py_ssize_t *start                     # [batch] position of query 0; needed by slopes
    Py_ssize_t start_batch                      # 1, or 0 if the items share it
    const double *slopes                        # [query head] of ALiBi, NULL: none
    const double *sinks                         # [query head] logits, NULL: none
    double softcap                              # 0: none
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
    Py_ssize_t kept                             # every row sees the first `kept` keys, whatever its lo (not its hi)
    # Few rows (_few.pxi)
    bint few                                    # all rows of a head are one block for the tiles with lanes = keys
    Py_ssize_t few_pitch                        # elements of a row of values in scratch
    Py_ssize_t heads_per_task                   # neighbours that a task takes one after the other,
    Py_ssize_t parts                            #   or tasks that share the chunks of one head,
    char *partials                              #   which leave [head][chunk] partial results here
    Py_ssize_t partial_bytes, partials_per_head

# One block of rows during a task. All buffers lie in the slot's scratch; pitch = vectors * lanes.
cdef struct Block:
    Py_ssize_t n_rows, pitch
    int vectors
    bint first                                  # no chunk was visited yet: ot holds nothing
    bint excludes                               # some visited key was excluded for some row
    Py_ssize_t lo, hi, all_lo, all_hi           # seen by some row: [lo, hi); by all rows: [all_lo, all_hi)
    Py_ssize_t gap_end                          # seen by none: [job.kept, gap_end)
    char *qt
    char *ot
    char *m
    char *l
    char *slope                                 # [pitch] of each row, in units of log2(e)
    char *position                              # [pitch] of each row, relative to the first key of a run
    char *tops                                  # [chunk][pitch] maximum of each chunk, if weights are wanted
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
    char *state_rows[AT_MAX_ROWS]

# What the blocks of a task use one after the other.
cdef struct Shared:
    char *st                                    # [AT_CHUNK][pitch] scores, then weights
    char *top                                   # [pitch] each: running maximum of the chunk,
    char *unused                                #   a place for maxima that a later step replaces,
    char *alpha                                 #   weights of the old and the new part,
    char *beta
    uint32_t *words                             # [WORDS][pitch]
    int kinds[WORDS]
    at_ahead ahead[3]                           # what the next scores fetch meanwhile
    int n_ahead
    char *panels                                # few rows: AT_FEW_KEYS keys,
    char *sum                                   #   [pitch] sums of the weights of a chunk
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


# ---------------------------------------------------------------------------------------------------------------
# Division of work and scratch
# ---------------------------------------------------------------------------------------------------------------
cdef int divide(Job *job, int threads) noexcept nogil:
    """Sets the block and task sizes and returns the number of threads that work.

    TASK_ROWS rows share a visit of a chunk unless threads would be short of tasks.
    """
    cdef Py_ssize_t rows = job.group * job.queries, heads = job.batch * job.kv_heads, blocks, share
    cdef double scores = <double> heads * <double> rows * <double> job.keys, widths = job.width + job.value_width
    if 2 * scores * widths < SERIAL_FLOPS and scores / rows * widths * job.tiles.itemsize < SERIAL_BYTES:
        threads = 1
    job.block_rows = job.tiles.max_vectors * job.tiles.lanes
    choose_few(job, rows, heads, threads)
    if not job.few:
        blocks = (rows + job.block_rows - 1) // job.block_rows
        share = min(<Py_ssize_t> MAX_BLOCKS, (TASK_ROWS + job.block_rows - 1) // job.block_rows)
        if threads > 1:
            share = max(<Py_ssize_t> 1, min(share, heads * blocks // (TASKS_PER_THREAD * threads)))
        job.tasks_per_head = (blocks + share - 1) // share
        job.blocks_per_task = (blocks + job.tasks_per_head - 1) // job.tasks_per_head
        job.tasks_per_head = (blocks + job.blocks_per_task - 1) // job.blocks_per_task
        job.tasks = heads * job.tasks_per_head
    return <int> min(<Py_ssize_t> threads, job.tasks)


cdef void choose_few(Job *job, Py_ssize_t rows, Py_ssize_t heads, int threads) noexcept nogil:
    """Whether the tiles for few rows are the faster ones, and how their work is divided.

    They take rows / lanes of the FMAs of a full vector, and transposes beside, so they pay up to 3/4 of a vector; and
    they can share the keys of a head among threads, which pays for more rows if there are too few heads.
    """
    cdef Py_ssize_t tiled = (rows + job.block_rows - 1) // job.block_rows * heads, chunks = chunks_before(job.keys)
    job.few = (job.weights.data == NULL and not job.filling and rows <= AT_MAX_ROWS
               and (4 * rows <= 3 * job.tiles.lanes or (tiled < threads and chunks > 1)))
    if not job.few:
        return
    job.block_rows, job.blocks_per_task = rows, 1
    job.few_pitch = (job.value_width + job.tiles.lanes - 1) // job.tiles.lanes * job.tiles.lanes
    job.parts, job.heads_per_task = 1, max(<Py_ssize_t> 1, heads // (TASKS_PER_THREAD * threads))
    if heads < FEW_TASKS_PER_THREAD * threads and threads > 1 and chunks <= MAX_PARTIALS // heads:
        job.parts = min(chunks, (FEW_TASKS_PER_THREAD * threads + heads - 1) // heads)
    job.tasks = (heads + job.heads_per_task - 1) // job.heads_per_task * job.parts


cdef void size_scratch(Job *job) noexcept nogil:
    """The bytes are handed out by open_shared and open_block; partial results lie behind the slots."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = largest_pitch(job)
    cdef Py_ssize_t chunks = chunks_before(job.keys) if job.weights.data != NULL else 0
    cdef Py_ssize_t values = aligned(max(rows * job.value_width, job.block_rows * job.few_pitch) * item)
    job.block_bytes = (aligned(sizeof(Block)) + aligned(rows * job.width * item) + values
                       + (4 + chunks) * aligned(rows * item))
    job.scratch_per_slot = (aligned(sizeof(Shared)) + aligned(AT_CHUNK * rows * item) + 4 * aligned(rows * item)
                            + aligned(WORDS * rows * sizeof(uint32_t)) + job.blocks_per_task * job.block_bytes)
    if job.few:
        job.scratch_per_slot += (aligned(AT_FEW_KEYS * job.width * item) + aligned(rows * item)
                                 + aligned(job.block_rows * job.few_pitch * item))
        job.partial_bytes = AT_ALIGN + 2 * aligned(rows * item) + aligned(job.block_rows * job.few_pitch * item)
        job.partials_per_head = chunks_before(job.keys) if job.parts > 1 else 0


cdef inline Py_ssize_t largest_pitch(const Job *job) noexcept nogil:
    """Rows of the largest block, in whole vectors."""
    cdef Py_ssize_t rows = min(job.block_rows, job.group * job.queries)
    return (rows + job.tiles.lanes - 1) // job.tiles.lanes * job.tiles.lanes


cdef void *scratch_of(Py_ssize_t nbytes) except NULL nogil:
    """This thread's scratch of at least so many bytes, kept for later calls."""
    cdef void *scratch = at_scratch(nbytes)
    if scratch == NULL:
        with gil:
            raise MemoryError(f"attentile: no memory for {nbytes} bytes of scratch")
    return scratch


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
    cdef bint some_kept = False
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
        if job.kept > 0 and block.row_hi[r] > 0:
            block.hi = max(block.hi, min(job.kept, block.row_hi[r]))
            some_kept = True
        i = i + 1 if i + 1 < job.queries else 0
    block.gap_end = block.lo
    if some_kept:
        block.lo = 0


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
    """Rows start .. start + n_rows of key head kv_head: buffers, pointers, intervals."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, head, i
    block.n_rows = min(job.block_rows, job.group * job.queries - start)
    block.vectors = <int> ((block.n_rows + job.tiles.lanes - 1) // job.tiles.lanes)
    block.pitch = block.vectors * job.tiles.lanes
    block.qt = take(&free_bytes, block.pitch * job.width * item)
    block.ot = take(&free_bytes, max(block.pitch * job.value_width, block.n_rows * job.few_pitch) * item)
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
    point_rows(job, <const char **> block.state_rows, &job.state, b, head, i, block.n_rows)
    find_intervals(job, block, b, i)
    find_head_scalars(job, block, b, head, i)


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
                word &= (interval_word(block.row_lo[r] - chunk - w * AT_WORD, block.row_hi[r] - chunk - w * AT_WORD)
                         | interval_word(0, min(job.kept, block.row_hi[r]) - chunk - w * AT_WORD))
            row[r] = word
            some |= word
            every &= word
        memset(row + block.n_rows, 0, (block.pitch - block.n_rows) * sizeof(uint32_t))
        shared.kinds[w] = ALL if every == full else (MIXED if some or job.filling else NONE)


cdef Shared *open_shared(const Job *job, char **free_bytes) noexcept nogil:
    """What the blocks of a task share, from the start of the slot's scratch."""
    cdef Py_ssize_t item = <Py_ssize_t> job.tiles.itemsize, rows = largest_pitch(job)
    cdef Shared *shared = <Shared *> take(free_bytes, sizeof(Shared))
    shared.st = take(free_bytes, AT_CHUNK * rows * item)
    shared.top = take(free_bytes, rows * item)
    shared.unused = take(free_bytes, rows * item)
    shared.alpha = take(free_bytes, rows * item)
    shared.beta = take(free_bytes, rows * item)
    shared.words = <uint32_t *> take(free_bytes, WORDS * rows * sizeof(uint32_t))
    fill_reals(shared.unused, item, rows, 0)
    if job.few:
        shared.panels = take(free_bytes, AT_FEW_KEYS * job.width * item)
        shared.sum = take(free_bytes, rows * item)
        shared.values = take(free_bytes, job.block_rows * job.few_pitch * item)
        fill_reals(shared.sum, item, rows, 0)       # lanes that are no rows
    return shared
