// The gradient of the bias: sums of dy over images and pixels. A block sums several rows of pixels of one channel, or
// of 32 neighbouring channels, and writes a part; im2col_gemm_sum.cu adds the parts.
//
// Constants: ELEMENT_*, CHANNELS_INNER (lanes are channels, otherwise columns), WARPS.

#include "conv2d.cuh"

constexpr int LANES = 32;

struct Params {
    const Element* dy;
    float* parts;     // [parts][channels]
    i64 n_stride, c_stride, h_stride, w_stride;
    i64 rows;         // of all images
    i64 rows_per_part;
    int channels, height, width;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(WARPS* LANES) void KERNEL(const __grid_constant__ Params p) {
    __shared__ float sums[WARPS][LANES];
    const int warp = threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const int groups = CHANNELS_INNER ? (p.channels + LANES - 1) / LANES : p.channels;
    const int channel = CHANNELS_INNER ? blockIdx.x % groups * LANES + lane : blockIdx.x % groups;
    const i64 part = blockIdx.x / groups, first = part * p.rows_per_part;
    const i64 end = min(first + p.rows_per_part, p.rows);
    float sum = 0;
    if (channel < p.channels) {
        for (i64 row = first + warp; row < end; row += WARPS) {
            const i64 n = row / p.height, i = row % p.height;
            const Element* at = p.dy + n * p.n_stride + channel * p.c_stride + i * p.h_stride;
            for (int j = CHANNELS_INNER ? 0 : lane; j < p.width; j += CHANNELS_INNER ? 1 : LANES)
                sum += to_float(at[j * p.w_stride]);
        }
    }
#if !CHANNELS_INNER
    for (int offset = LANES / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
#endif
    sums[warp][lane] = sum;
    __syncthreads();
    if (warp == 0 && channel < p.channels && (CHANNELS_INNER || lane == 0)) {
#pragma unroll
        for (int w = 1; w < WARPS; w++) sum += sums[w][lane];
        p.parts[part * p.channels + channel] = sum;
    }
}
