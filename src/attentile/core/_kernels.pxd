# The declarations of kernels/kernels.h, line by line. The contract is written there.
from libc.stdint cimport int64_t, uint16_t, uint32_t

cdef extern from "kernels/halves.h" nogil:
    float at_float_of_f16(uint16_t half)
    float at_float_of_bf16(uint16_t half)

cdef extern from "kernels/kernels.h" nogil:
    enum:
        AT_F16
        AT_BF16
        AT_F32
        AT_F64
        AT_CHUNK
        AT_WORD
        AT_ROW_CHUNK
        AT_MAX_VECTORS
        AT_MAX_ROWS
        AT_ALIGN
        AT_PANEL
        AT_FEW_KEYS
        AT_MIN_POWER_F32
        AT_MIN_POWER_F64
        AT_PEAK_FMAS
        AT_STRIP_PAIRS
        AT_APART
        AT_ALTERNATING
        AT_ROTATION
        AT_ANGLE_BLOCK
    const double LOG2E "AT_LOG2E"
    const double LN2 "AT_LN2"

    ctypedef struct at_ahead:
        const char **rows
        const char *data
        Py_ssize_t stride, n_rows, offset, bytes

    ctypedef struct at_value_rows:
        const char *rows
        Py_ssize_t stride, keys
        const char *ahead
        Py_ssize_t ahead_stride

    ctypedef struct at_row_numbers:
        void *lse
        void *share
        void *delta

    ctypedef struct at_outer_rows:
        const void *a
        const char **rows
        Py_ssize_t n_rows, pitch

    ctypedef struct at_sums:
        char *rows
        Py_ssize_t stride
        double factor
        bint first

    ctypedef struct at_top:
        void *values
        Py_ssize_t *keys
        Py_ssize_t n, k, room
        double limit

    Py_ssize_t AT_TOP_SCRATCH(Py_ssize_t room)
    Py_ssize_t AT_SIZE_OF(int format)

    ctypedef struct at_tiles:
        size_t itemsize
        int lanes
        int max_vectors
        void (*pack)(void *qt, const char **rows, Py_ssize_t n_rows, int vectors, Py_ssize_t width,
                     double factor) noexcept nogil
        void (**scores)(void *st, void *block_max, const void *qt, const char *k, Py_ssize_t k_stride,
                        Py_ssize_t k_step, Py_ssize_t width, Py_ssize_t keys,
                        const at_ahead *ahead, int n_ahead) noexcept nogil
        void (*convert)(void *to, const char *row, Py_ssize_t stride, Py_ssize_t n, int format) noexcept nogil
        void (*widen)(void *to, const char *source, Py_ssize_t n, int format) noexcept nogil
        void (*narrow)(char *row, const void *source, Py_ssize_t n, int format) noexcept nogil
        void (*add_bias)(void *st, void *block_max, const char **rows, Py_ssize_t key_stride, Py_ssize_t n_rows,
                         int vectors, Py_ssize_t keys) noexcept nogil
        void (*softcap)(void *st, void *block_max, int vectors, Py_ssize_t keys, double slope,
                        double cap) noexcept nogil
        void (*alibi)(void *st, void *block_max, const void *slope, const void *position, int vectors,
                      Py_ssize_t keys) noexcept nogil
        void (*exclude)(void *st, void *block_max, const uint32_t *words, int vectors, Py_ssize_t keys,
                        double fill) noexcept nogil
        void (**softmax)(void *st, Py_ssize_t keys, const void *block_max, void *m, void *l, void *alpha,
                         void *beta) noexcept nogil
        void (**values)(void *ot, const void *st, const char *v, Py_ssize_t v_stride, Py_ssize_t width,
                        Py_ssize_t keys, const void *alpha, const void *beta, int first) noexcept nogil
        void (*values_marked)(void *ot, const void *st, const char *v, Py_ssize_t v_stride, Py_ssize_t width,
                              Py_ssize_t keys, const void *alpha, const void *beta, int first,
                              int vectors) noexcept nogil
        int (*any_nan)(const void *ot, int vectors, Py_ssize_t width) noexcept nogil
        void (*reciprocal)(void *r, const void *l, int vectors) noexcept nogil
        void (*unpack)(char **rows, const void *ot, const void *factor, Py_ssize_t n_rows, int vectors,
                       Py_ssize_t width) noexcept nogil
        void (*rescale)(void *row, Py_ssize_t keys, double block_max, double m, double l) noexcept nogil
        void (*few_pack)(void *q, const char **rows, Py_ssize_t n_rows, Py_ssize_t width, double factor) noexcept nogil
        void (*to_panels)(void *panels, const char *k, Py_ssize_t k_stride, Py_ssize_t width,
                          Py_ssize_t keys) noexcept nogil
        void (**few_scores)(void *s, const void *q, Py_ssize_t n_rows, const char *k, Py_ssize_t k_stride,
                            void *panels, Py_ssize_t width, Py_ssize_t keys, const char *ahead,
                            Py_ssize_t ahead_stride) noexcept nogil
        void (*few_bias)(void *s, const char *bias, Py_ssize_t key_stride, Py_ssize_t keys) noexcept nogil
        void (*few_alibi)(void *s, double slope, double position, Py_ssize_t keys) noexcept nogil
        void (*few_exclude)(void *s, const uint32_t *words, Py_ssize_t pitch, Py_ssize_t keys,
                            double fill) noexcept nogil
        double (*few_softmax)(void *s, Py_ssize_t keys) noexcept nogil
        void (**few_values)(void *o, void *l, const void *s, Py_ssize_t n_rows, const at_value_rows *v,
                            Py_ssize_t width) noexcept nogil
        void (*few_values_marked)(void *o, void *l, const void *s, Py_ssize_t n_rows, const char *v,
                                  Py_ssize_t v_stride, Py_ssize_t width, Py_ssize_t keys) noexcept nogil
        void (*few_merge)(const void *block_max, const void *sum, void *m, void *l, void *alpha, void *beta,
                          int vectors) noexcept nogil
        void (*few_blend)(void *o, const void *chunk, Py_ssize_t n, double alpha, double beta) noexcept nogil
        void (*few_store)(char *row, const void *o, Py_ssize_t width, double factor) noexcept nogil
        void (*add_totals)(double *totals, const void *st, Py_ssize_t keys, const void *alpha, const void *beta,
                           int vectors) noexcept nogil
        double (*few_total)(const void *s, Py_ssize_t keys) noexcept nogil
        void (*measure)(void *st, Py_ssize_t keys, const void *m, const void *inverse, double *rest, double *moment,
                        int vectors) noexcept nogil
        void (*add_rows)(double *sum, const char **rows, Py_ssize_t n_rows, Py_ssize_t keys) noexcept nogil
        void (*keep_top)(at_top *top, const void *row, Py_ssize_t n, Py_ssize_t first_key, void *scratch) noexcept nogil
        void (*store_top)(at_top *top, void *values, Py_ssize_t *keys, void *scratch) noexcept nogil
        void (*weigh)(void *st, void *dp, const at_row_numbers *rows, int vectors, Py_ssize_t keys) noexcept nogil
        void (*row_dots)(void *sums, const void *a, const void *b, int vectors, Py_ssize_t width) noexcept nogil
        void (*uncap)(void *ds, const void *capped, int vectors, Py_ssize_t keys, double cap) noexcept nogil
        void (*add_outer)(const at_sums *to, const at_outer_rows *parts, int n_parts, Py_ssize_t width, Py_ssize_t keys,
                          bint marked) noexcept nogil
        void (*mark_zeros)(void *ds, int vectors, Py_ssize_t keys) noexcept nogil
        int (*all_finite)(const char **rows, Py_ssize_t n_rows, Py_ssize_t width) noexcept nogil
        void (*add_row)(char *to, Py_ssize_t stride, const void *row, Py_ssize_t keys) noexcept nogil
        void (*add_distances)(double *sums, const void *ds, const void *position, Py_ssize_t n_rows, int vectors,
                              Py_ssize_t keys) noexcept nogil
        double (*fma_peak)(Py_ssize_t rounds) noexcept nogil
        double (*read)(const void *data, Py_ssize_t n) noexcept nogil

    ctypedef struct at_rotary_rows:
        const char *x
        char *y
        Py_ssize_t x_stride, y_stride, rows
        Py_ssize_t pairs, apart
        Py_ssize_t tail_from, tail
        const double *table
        Py_ssize_t pitch, sines

    ctypedef struct at_angles:
        void (*frequencies)(double *high, double *low, Py_ssize_t pairs, double ratio_high,
                            double ratio_low) noexcept nogil
        void (*sincos)(double *cosines, double *sines, double position, const double *high, const double *low,
                       Py_ssize_t pairs, int layout) noexcept nogil
        void (*rotate)(double *row, const double *cosines, const double *sines, const double *fine,
                       Py_ssize_t width) noexcept nogil
        void (*rotate_f32)(float *row, const double *cosines, const double *sines, const double *fine,
                           Py_ssize_t width) noexcept nogil
        void (*sum_of)(double *table, const double *a, const double *b, Py_ssize_t pairs, double cosine_factor,
                       double sine_factor, int interleaved) noexcept nogil
        void (*rotate_rows[4][2])(const at_rotary_rows *rows) noexcept nogil

    ctypedef struct at_isa:
        const char *name
        const at_tiles *f32
        const at_tiles *f64
        const at_angles *angles

    int at_isa_count()
    const at_isa *at_isa_at(int index)
    int at_isa_supported(int index)
    at_tiles at_idle_like(const at_tiles *tiles)

    ctypedef void (*at_task)(void *job, Py_ssize_t index, int slot) noexcept nogil
    void at_pool_run(at_task task, void *job, Py_ssize_t tasks, int threads)
    int at_pool_workers()
    void at_pass(int64_t *passed, int64_t place)
    void at_await(const int64_t *passed, int64_t place)
    void *at_scratch(size_t bytes)

    double at_log2(double x) noexcept nogil
    double at_exp2(double x) noexcept nogil

    void at_mask_words(uint32_t *words, const char **rows, Py_ssize_t key_stride, Py_ssize_t n_rows,
                       Py_ssize_t pitch, Py_ssize_t keys)
    int at_mask_run(const char *row, Py_ssize_t key_stride, Py_ssize_t keys, Py_ssize_t *lo, Py_ssize_t *hi)

cdef extern from "kernels/guard.h" nogil:
    int at_guard_enter(int *users, int change)
    void at_guard_leave(int *users, int change)
