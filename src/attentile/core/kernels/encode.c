/* The sinusoidal positional encoding (Vaswani et al. 2017, section 3.5), row by row:
 *
 *     out[i][2 x]     = sin((first_position + i) * ratio^x)       x < ceil(d_model / 2); an odd d_model
 *     out[i][2 x + 1] = cos((first_position + i) * ratio^x)       ends with a sine
 *
 * A position is 64 a + b with 0 <= b < 64. The fine table holds the angles of every b, the rotation those of one a,
 * and a row is the one turned by the other. The split is by absolute position, so a row's bits depend on its position
 * alone. Sines are computed for 64 + rows / 64 rows; the rest is one pass at the speed of the stores.
 *
 * Columns go in strips, so that the fine table stays in the L2 cache at any width (64 rows * 512 columns * 8 bytes =
 * 256 KiB) and the scratch is bounded by it. */
#include "kernels.h"

#define ROWS 64   /* positions per rotation */
#define STRIP 512 /* columns per strip: a whole number of blocks of pairs */

static ptrdiff_t padded_pairs(ptrdiff_t columns) {
    const ptrdiff_t pairs = columns / 2 + columns % 2;
    return (pairs + AT_ANGLE_BLOCK - 1) / AT_ANGLE_BLOCK * AT_ANGLE_BLOCK;
}

static ptrdiff_t table_width(ptrdiff_t d_model) { return 2 * padded_pairs(d_model < STRIP ? d_model : STRIP); }

size_t at_encode_scratch(ptrdiff_t d_model) {
    return sizeof(double) * (size_t)(2 * padded_pairs(d_model) + (2 + ROWS) * table_width(d_model));
}

void at_encode(const at_angles* angles, void* out, ptrdiff_t row_stride_bytes, ptrdiff_t rows, ptrdiff_t d_model,
               double first_position, double ratio_high, double ratio_low, int single, double* scratch) {
    const ptrdiff_t all_pairs = padded_pairs(d_model), pitch = table_width(d_model);
    double *high = scratch, *low = high + all_pairs, *cosines = low + all_pairs, *sines = cosines + pitch,
           *fine = sines + pitch;
    const int64_t first = (int64_t)first_position, first_b = first & (ROWS - 1); /* and: floor for negatives too */
    const size_t itemsize = single ? sizeof(float) : sizeof(double);

    angles->frequencies(high, low, all_pairs, ratio_high, ratio_low);
    for (ptrdiff_t column = 0; column < d_model; column += STRIP) {
        const ptrdiff_t width = d_model - column < STRIP ? d_model - column : STRIP, pairs = padded_pairs(width);
        const double *strip_high = high + column / 2, *strip_low = low + column / 2;
        for (ptrdiff_t b = 0; b < ROWS; b++)
            if (((b - first_b) & (ROWS - 1)) < rows) /* short calls meet only some b */
                angles->sincos(fine + b * pitch, (double)b, strip_high, strip_low, pairs);
        for (ptrdiff_t i = 0; i < rows; i++) {
            const ptrdiff_t b = (first_b + i) & (ROWS - 1);
            if (i == 0 || b == 0) angles->turn(cosines, sines, (double)(first + i - b), strip_high, strip_low, pairs);
            char* row = (char*)out + i * row_stride_bytes + column * (ptrdiff_t)itemsize;
            if (single)
                angles->rotate_f32((float*)row, cosines, sines, fine + b * pitch, width);
            else
                angles->rotate((double*)row, cosines, sines, fine + b * pitch, width);
        }
    }
}
