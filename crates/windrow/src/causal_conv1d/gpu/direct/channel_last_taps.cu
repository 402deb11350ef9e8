// y where channels lie next to each other in x and y (stride 1 along d), one sequence per row, 2 <= TAPS <= 256, all
// addresses aligned to VECTOR elements.
//
// Floor: x once in, y once out, or TAPS products per element where that is longer. A thread takes VECTOR channels of
// ROWS positions: it walks over the taps with a window of ROWS inputs in registers, each of which is multiplied for
// ROWS sums. Inputs come from the first-level cache, to which neighbouring threads have brought them; weights come from
// shared memory. LANES threads lie along the channels, so that few channels fill warps too.
//
// TAPS     number of taps
// VECTOR   channels of a thread
// ROWS     positions of a thread
// LANES    threads of a block along the channels
#include "causal_conv1d.cuh"

constexpr int THREADS = 128, HALO = TAPS - 1, COLUMNS = LANES * VECTOR, GROUPS = THREADS / LANES;
// Of a row of weights in shared memory: writes along the taps have few bank conflicts.
constexpr int PITCH = COLUMNS + 4;
typedef Raw<T, VECTOR> Vector;

struct Taps {
    // The input i positions after the oldest one of a step lies in slot i % ROWS.
    float window[ROWS][VECTOR], sum[ROWS][VECTOR];

    // N taps from a weight on; `next` holds the inputs that follow the window.
    template <int N>
    __device__ __forceinline__ void add(const float *weight, const Vector (&next)[N]) {
#pragma unroll
        for (int k = 0; k < N; k++) {
            float w[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) w[i] = weight[k * PITCH + i];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int i = 0; i < VECTOR; i++) sum[r][i] = fmaf(w[i], window[(k + r) % ROWS][i], sum[r][i]);
            }
            next[k].unpack(window[k % ROWS]);
        }
    }
};

// Inputs of N positions from t on; 0 outside of the row.
template <int N>
__device__ __forceinline__ void inputs(const S *x, i64 stride, int t, int length, Vector (&out)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        out[i] = {};
        if ((unsigned)(t + i) < (unsigned)length) out[i].template load<VECTOR>(x);
        x += stride;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ __align__(16) float weights[TAPS][PITCH];
    int lane = threadIdx.x % LANES, group = threadIdx.x / LANES, length = (int)p.length;
    i64 first = (i64)blockIdx.x * COLUMNS, d = first + lane * VECTOR, b = blockIdx.z;
    Output output = output_of(p, d);
    i64 x_stride = p.x_stride[2], y_stride = output.stride[2];
    const S *row = p.x + b * p.x_stride[0] + d;
    bool active = d < p.channels;
    int start = (blockIdx.y * GROUPS + group) * ROWS;
    // The oldest inputs of the next step, on their way.
    Vector oldest[ROWS];
    if (active) inputs(row + (start - HALO) * x_stride, x_stride, start - HALO, length, oldest);
    for (int i = threadIdx.x; i < TAPS * COLUMNS; i += THREADS) {
        // Neighbouring threads read along the taps.
        int column = i / TAPS, k = i % TAPS;
        weights[k][column] = first + column < p.channels ? weight_at(p, first + column, k) : 0.0f;
    }
    __syncthreads();
    if (!active) return;
    float bias[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) bias[i] = bias_at(p, d + i);

    while (start < length) {
        Taps taps;
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            oldest[r].unpack(taps.window[r]);
#pragma unroll
            for (int i = 0; i < VECTOR; i++) taps.sum[r][i] = bias[i];
        }
        int t = start - HALO + ROWS;
        const S *x = row + t * x_stride;
        const float *weight = &weights[0][lane * VECTOR];
        constexpr int WHOLE = TAPS / ROWS, REST = TAPS % ROWS;
        Vector next[ROWS], rest[REST > 0 ? REST : 1];
#pragma unroll(WHOLE <= 2 ? 2 : 1)
        for (int k = 0; k < WHOLE; k++) {
            inputs(x, x_stride, t, length, next);
            taps.add(weight, next);
            x += ROWS * x_stride, t += ROWS, weight += ROWS * PITCH;
        }
        if constexpr (REST > 0) {
            inputs(x, x_stride, t, length, rest);
            taps.add(weight, rest);
        }
        S *y = output.y + b * output.stride[0] + d + start * y_stride;
        int end = length - start;
        start += gridDim.y * GROUPS * ROWS;
        inputs(row + (start - HALO) * x_stride, x_stride, start - HALO, length, oldest);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            if (r >= end) break;
            float out[VECTOR];
#pragma unroll
            for (int i = 0; i < VECTOR; i++) out[i] = finish(taps.sum[r][i]);
            Vector v;
            v.pack(out);
            v.template store<VECTOR>(y);
            y += y_stride;
        }
    }
}
