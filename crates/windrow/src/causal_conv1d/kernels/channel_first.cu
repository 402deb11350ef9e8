// y where positions lie next to each other in x and y (stride 1 along l), 2 <= WIDTH <= 9,
// length < 2^30.
//
// Floor: x once in, y once out. A warp takes STEPS blocks of 32 vectors of one row: all loads are
// issued before the first use (STEPS x 512 bytes a warp), and the WIDTH - 1 inputs before a vector
// come from the neighbouring lane. About 13 issue slots an element with SiLU in half types, of the
// 32 that an H200 has per 4 bytes moved.
//
// MASK   take sequences from the mask
#include "causal_conv1d.cuh"

constexpr int VECTOR = 16 / (int)sizeof(S);
constexpr int HALO = WIDTH - 1;
static_assert(HALO >= 1 && HALO <= VECTOR, "the halo is part of one vector");

typedef Raw<T, VECTOR> Vector;

// Elements start .. start + VECTOR of a row; 0 outside.
__device__ __forceinline__ Vector load_vector(const S *row, int start, int length, bool aligned) {
    Vector v;
    if (aligned && start >= 0 && start + VECTOR <= length) {
        v.template load<VECTOR>(row + start);
    } else {
        float f[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            int t = start + i;
            f[i] = t >= 0 && t < length ? T::to_float(row[t]) : 0.0f;
        }
        v.pack(f);
    }
    return v;
}

extern "C" __global__ void __launch_bounds__(128) KERNEL(const Params p) {
    constexpr unsigned ALL = 0xffffffff;
    int lane = threadIdx.x % 32, length = (int)p.length;
    int block = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    i64 d = (i64)blockIdx.y * blockDim.y + threadIdx.y, b = blockIdx.z;
    if (d >= p.channels) return;
    const S *x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
    S *y = p.y + b * p.y_stride[0] + d * p.y_stride[1];
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
        // The words that hold the last HALO elements of the vector before this one.
        constexpr int KEEP = (VECTOR - HALO) * (int)sizeof(S) / 4;
        Vector last;
#pragma unroll
        for (int i = KEEP; i < 4; i++) {
            unsigned word = s > 0 && lane == 31 ? in[s > 0 ? s - 1 : 0].words[i] : in[s].words[i];
            last.words[i] = __shfl_sync(ALL, word, (lane + 31) % 32);
        }
        if (start >= length) continue;
        float window[HALO + VECTOR];
#pragma unroll
        for (int i = 0; i < HALO; i++) {
            window[i] = s == 0 && lane == 0 ? before[i] : last.get(VECTOR - HALO + i);
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) window[HALO + i] = in[s].get(i);
        float out[VECTOR];
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float sum = fmaf(weight[HALO][0], window[HALO + i], bias);
            unsigned mask = 0;
            int t = start + i;
            if (MASK && t >= 0 && t < length) mask = p.mask[b * p.length + t];
#pragma unroll
            for (int j = 1; j <= HALO; j++) {
                float v = window[HALO + i - j];
                if (MASK) v = mask >> (j - 1) & 1 ? v : 0.0f;
                sum = fmaf(weight[HALO - j][0], v, sum);
            }
            out[i] = MASK && mask & 0x8000 ? 0.0f : finish(sum);
        }
        if (start >= 0 && start + VECTOR <= length) {
            Vector v;
            v.pack(out);
            v.template store<VECTOR>(y + start);
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                int t = start + i;
                if (t >= 0 && t < length) y[t] = T::from_float(out[i]);
            }
        }
    }
}
