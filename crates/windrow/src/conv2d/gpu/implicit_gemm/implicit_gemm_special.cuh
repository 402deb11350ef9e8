// Outputs of implicit_gemm.cu that would be NaN, computed again as plain sums in f32. If an operand is infinite, its
// f16 parts are infinity and NaN. And if one group has a NaN, its product with the zeros of another group is NaN.

#include "implicit_gemm_output.cuh"

// A weight as it was before it was packed, except for its last bits: see implicit_gemm_filter.cu.
__device__ __forceinline__ float weight_at(const Params& p, int k_block, int column, int term, float scale) {
    const int n = 32 * (column / 32) + 8 * (column % 8 / 2) + 2 * (column % 32 / 8) + column % 2;
    const i64 product = static_cast<i64>(k_block) * p.steps * TAP_PRODUCTS + term / 16;
    const int at = term % 4 / 2 * (8 * BLOCK_K) + n / 8 * 64 + n % 8 * 8 + term % 16 / 4 * 2 + term % 2;
    const u16* const halves = reinterpret_cast<const u16*>(p.filter) + product * PART_BYTES + at;
    const float high = f16_to_float(halves[0]), low = f16_to_float(halves[PART_BYTES / 2]);
    const float sum = fabsf(high) < __int_as_float(0x7f800000) ? high + low : high;
    return sum * (1.0f / (1u << FILTER_EXPONENT)) * scale;
}

// A warp's outputs in columns j0 to j0 + j_count of the product, of 16 pixels.
__device__ __noinline__ void store_plain_sums(const Params& p, int pixel0, int k_block, int j0, int j_count, int lane,
                                              const Channels& channels) {
    __syncwarp();
    const Columns columns(p, k_block);
    const int unit_c = static_cast<int>(p.c.value);
    for (int i = lane; i < 128 * j_count; i += 32) {
        const int pixel = pixel0 + i % 16, column = channel_of(i / 32 % 4, j0 + i / 128, i / 16 % 2);
        const int k = columns.first + column;
        if (!has_pixel(p, pixel) || k >= columns.end) continue;
        const Pixel at(p, pixel);
        const int c0 = p.group_k.divide(k - columns.unit * p.unit_k) * p.group_c;
        float sum = 0;
        for (int r = 0; r < p.r; r++) {
            const Source from(p, at.image, r);
            if (!from.exists) continue;
            const i64 image = FRAMES ? 0 : at.image * p.x_n;
            const float* const x = from.x + (image + static_cast<i64>(columns.unit) * unit_c * from.x_c);
            for (int s = 0; s < static_cast<int>(p.s.value); s++) {
                const int row = at.row * p.stride_h - p.pad_h + row_of(p, r) * p.dilation_h;
                const int at_x = at.column * p.stride_w - p.pad_w + s * p.dilation_w;
                if (static_cast<u32>(row) >= static_cast<u32>(p.h) || static_cast<u32>(at_x) >= static_cast<u32>(p.w))
                    continue;
                const int tap = (r * static_cast<int>(p.s.value) + s) * unit_c;
                for (int c = c0; c < c0 + p.group_c; c++)
                    sum = fmaf(x[c * from.x_c + row * p.x_h + at_x * p.x_w],
                               weight_at(p, k_block, column, tap + c, channels.scale[column]), sum);
            }
        }
        float* const to = p.y + (at.image * p.y_n + k * p.y_k + at.row * p.y_h + at.column * p.y_w);
        sum += channels.bias[column];
        *to = epilogue(RESIDUAL ? sum + *beside(p.residual, p.y, to) : sum);
    }
    __syncwarp();
}
