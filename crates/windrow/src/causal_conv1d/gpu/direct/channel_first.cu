// y where positions lie next to each other in x and y (stride 1 along l), 2 <= WIDTH <= 9,
// length < 2^30.
//
// Floor: x once in, y once out. A warp takes STEPS blocks of 32 vectors of one row: all loads are
// issued before the first use (STEPS x 512 bytes per warp), and the WIDTH - 1 inputs before a vector
// come from the neighbouring lane. About 13 issue slots per element with SiLU in f16/bf16, of the
// 32 that an H200 has per 4 bytes moved.
#include "row.cuh"

extern "C" __global__ void __launch_bounds__(128) KERNEL(const Params p) {
    wait_for_previous();
    int lane = threadIdx.x % 32, length = (int)p.length;
    int block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    i64 d = (i64)blockIdx.y * blockDim.y + threadIdx.y, b = blockIdx.z;
    if (d >= p.channels) return;
    const S *x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    Output output = output_of(p, d);
    S *y = output.y + b * output.stride[0] + d * output.stride[1];
    // Vectors start where y is aligned; the first one of a misaligned row is cut short.
    int lead = (int)((unsigned long long)y / sizeof(S) % VECTOR);
    bool aligned = is_aligned<VECTOR>(x - lead);
    int first = (block * STEPS * 32 + lane) * VECTOR - lead;
    if (first - lane * VECTOR >= length) return;

    Vector in[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        in[s] = load_vector(x, first + s * 32 * VECTOR, length, aligned);
    }
    float before[HALO];
    if (lane == 0) {
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            int t = first - HALO + i;
            before[i] = t >= 0 && t < length ? T::to_float(x[t]) : 0.0f;
        }
    }
    float weight[WIDTH][1], bias = bias_at(p, d);
    weights_at(p, d, weight);

#pragma unroll
    for (int s = 0; s < STEPS; s++) {
        int start = first + s * 32 * VECTOR;
        Tail tail(in[s], in[s > 0 ? s - 1 : 0]);
        if (start >= length) continue;
        float window[HALO + VECTOR];
        fill_window(window, tail, in[s]);
        if (s == 0 && lane == 0) {
#pragma unroll
            for (int i = 0; i < HALO; i++) window[i] = before[i];
        }
        unsigned mask[VECTOR];
        load_mask(p, b, start, mask);
        float out[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float sum = sum_taps<WIDTH>(
                bias, WIDTH, [&](int k) { return weight[k][0]; },
                [&](int k) { return seen(window[i + k], mask[i], HALO - k); });
            out[i] = MASK && mask[i] & 0x8000 ? 0.0f : finish(sum);
        }
        store_vector(y, start, length, out);
    }
}
