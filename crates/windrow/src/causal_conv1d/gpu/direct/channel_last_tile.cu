// y where channels lie next to each other in x and y (stride 1 along d), 2 <= WIDTH <= 5, all
// addresses aligned to VECTOR elements.
//
// Floor: x once in, y once out. A thread takes VECTOR channels of ROWS positions, all of whose loads are on their way
// before the first use; the WIDTH - 1 rows before them come from the cache, to which the neighbouring warps and the
// block before have just brought them.
//
// MASK     take sequences from the mask
// VECTOR   channels of a thread
// ROWS     positions of a thread
#include "causal_conv1d.cuh"

constexpr int HALO = WIDTH - 1;
typedef Raw<T, VECTOR> Vector;

#if MASK
#define BOUNDS __launch_bounds__(128, 1) // masks take registers
#else
#define BOUNDS __launch_bounds__(128)
#endif

extern "C" __global__ void BOUNDS KERNEL(const Params p) {
    wait_for_previous();
    i64 d = ((i64)blockIdx.x * 32 + threadIdx.x % 32) * VECTOR, b = blockIdx.z;
    if (d >= p.channels) return;
    int length = (int)p.length, first = (blockIdx.y * 4 + threadIdx.x / 32) * ROWS;
    const S *x = p.x + b * p.x_stride[0] + d + (first - HALO) * p.x_stride[2];
    Output output = output_of(p, d);
    S *y = output.y + b * output.stride[0] + d + first * output.stride[2];
    Vector in[ROWS + HALO];
#pragma unroll
    for (int r = 0; r < ROWS + HALO; r++) {
        int t = first - HALO + r;
        in[r] = {};
        if (t >= 0 && t < length) in[r].template load<VECTOR>(x + r * p.x_stride[2]);
    }
    float weight[WIDTH][VECTOR], bias[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) bias[i] = bias_at(p, d + i);
    weights_at(p, d, weight);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        if (first + r >= length) return;
        unsigned mask = MASK ? p.mask[b * p.length + first + r] : 0;
        float out[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float sum = sum_taps<WIDTH>(
                bias[i], WIDTH, [&](int k) { return weight[k][i]; },
                [&](int k) { return seen(in[r + k].get(i), mask, HALO - k); });
            out[i] = MASK && mask & 0x8000 ? 0.0f : finish(sum);
        }
        Vector v;
        v.pack(out);
        normalise(p, d, v);
        v.template store<VECTOR>(y + r * output.stride[2]);
    }
}
