# What a call would do, in numbers, for explain(): the pass's own division of the work, its own blocks of rows and its
# own way over the chunks of keys, with tiles that do nothing (kernels/idle.c). Queries, keys and values are not read
# and no result is written; a mask and a bias are read as the pass reads them. Included by _core.pyx after _pass.pxi.

cdef extern from *:
    int popcount "__builtin_popcount"(unsigned int x) noexcept nogil

# Sums over all calls of the pass, largest values of what is no sum.
cdef struct Counts:
    int threads                                 # that would work
    int core_calls
    int lanes
    bint few
    Py_ssize_t block_rows, blocks, tasks
    Py_ssize_t rows, pitches                    # pitches: rows in whole vectors
    Py_ssize_t chunks, chunks_visited           # pairs of a block and a chunk of keys
    Py_ssize_t chunks_idle                      # visited, but the bias excludes every key
    Py_ssize_t pairs                            # of a query and a key that it sees
    Py_ssize_t executed_flops
    bint bias_excludes                          # some entry is -inf,
    bint bias_adds                              #   some is neither 0 nor -inf; of the keys that are seen without it

cdef struct Counting:
    Job *job
    Counts counts


cdef void count_division(Counts *counts, const Job *job, int threads) noexcept nogil:
    """What divide() has found."""
    cdef Py_ssize_t heads = job.batch * job.kv_heads, rows = job.group * job.queries, lanes = job.tiles.lanes
    cdef Py_ssize_t blocks = heads * ((rows + job.block_rows - 1) // job.block_rows)
    counts.threads = max(counts.threads, threads)
    counts.core_calls += 1
    counts.lanes = job.tiles.lanes
    counts.few = job.few
    counts.block_rows = job.block_rows
    counts.blocks += blocks
    counts.tasks += job.tasks
    counts.rows += heads * rows
    counts.pitches += heads * (rows if job.few else (rows + lanes - 1) // lanes * lanes)
    counts.chunks += blocks * chunks_before(job.keys)


cdef uint32_t without_bias(Counts *counts, const Job *job, const char *bias, uint32_t seen) noexcept nogil:
    """The keys of a word that a row still sees when its bias from the word's first key on is looked at."""
    cdef int j
    cdef double x
    for j in range(AT_WORD):
        if seen >> j & 1:
            x = bias_at(job, bias + j * job.bias.column)
            if x == -INFINITY:
                counts.bias_excludes = True
                seen ^= <uint32_t> 1 << j
            elif x != 0:
                counts.bias_adds = True
    return seen


cdef Py_ssize_t count_words(Counts *counts, const Job *job, const Block *block, const Shared *shared,
                            const Run *run, Py_ssize_t *scored) noexcept nogil:
    """Pairs of a run of keys, word by word; *scored: keys of those words that are not skipped. kind ALL: no words."""
    cdef Py_ssize_t w, r, n, pairs = 0
    cdef uint32_t seen
    scored[0] = 0
    for w in range(run.start // AT_WORD, (run.stop + AT_WORD - 1) // AT_WORD):
        n = min(<Py_ssize_t> AT_WORD, run.stop - w * AT_WORD)
        if run.kind != ALL and shared.kinds[w] == NONE:
            continue
        scored[0] += n
        for r in range(block.n_rows):
            seen = interval_word(0, n) if run.kind == ALL else shared.words[w * block.pitch + r]
            if job.bias.data != NULL:
                seen = without_bias(counts, job, block.bias_rows[r] + (run.chunk + w * AT_WORD) * job.bias.column, seen)
            pairs += popcount(seen)
    return pairs


cdef void count_chunk(Counting *counting, const Block *block, const Shared *shared, Run *run) noexcept nogil:
    """A chunk of which the pass visits the keys run.chunk + run.start .. run.chunk + run.stop."""
    cdef const Job *job = counting.job
    cdef Counts *counts = &counting.counts
    cdef Py_ssize_t pitch = block.n_rows if job.few else block.pitch, n = run.stop - run.start
    cdef Py_ssize_t pairs = block.n_rows * n, scored = n
    run.kind = ALL if sees_all(block, run.chunk + run.start, run.chunk + run.stop) else MIXED
    if run.kind != ALL or job.bias.data != NULL:
        pairs = count_words(counts, job, block, shared, run, &scored)
    counts.chunks_visited += 1
    counts.chunks_idle += pairs == 0
    counts.pairs += pairs
    counts.executed_flops += 2 * pitch * (scored * job.width + n * job.value_width)


cdef void count_head(Counting *counting, Block *block, Shared *shared, char *free_bytes, Py_ssize_t b,
                     Py_ssize_t head) noexcept nogil:
    """All blocks of one key head."""
    cdef const Job *job = counting.job
    cdef Py_ssize_t first = 0, c
    cdef Run run
    cdef Rows k
    k.first, k.stride = NULL, 0                 # not read
    while first < job.group * job.queries:
        open_block(job, block, free_bytes, b, head, first)
        for c in range(block.lo // AT_CHUNK, chunks_before(block.hi)):
            run.chunk = c * AT_CHUNK
            if score_chunk(job, block, shared, k, NULL, run.chunk, &run.start, &run.stop):
                count_chunk(counting, block, shared, &run)
        first += job.block_rows


cdef int run_counting(void *counting_pointer, int threads) except -1 nogil:
    """In the calling thread alone, however many would work."""
    cdef Counting *counting = <Counting *> counting_pointer
    cdef Job *job = counting.job
    cdef Py_ssize_t head
    cdef char *free_bytes
    cdef Shared *shared
    cdef Block *block
    count_division(&counting.counts, job, divide(job, threads))
    size_scratch(job)
    free_bytes = <char *> scratch_of(job.scratch_per_slot)
    shared = open_shared(job, &free_bytes)
    shared.n_ahead = 0
    block = <Block *> take(&free_bytes, sizeof(Block))
    for head in range(job.batch * job.kv_heads):
        count_head(counting, block, shared, free_bytes, head // job.kv_heads, head % job.kv_heads)
    return 0
