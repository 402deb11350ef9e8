// y where channels lie next to each other in x and y (stride 1 along d), 2 <= WIDTH <= 9, all
// addresses aligned to VECTOR elements.
//
// Floor: x once in, y once out. A thread takes VECTOR channels and walks along `chunk` positions
// with the last WIDTH - 1 inputs in registers and the next STEPS on their way. The halo of a chunk is read
// again: from L2, where the chunk before has just brought it.
//
// MASK     take sequences from the mask
// VECTOR   channels of a thread
#include "causal_conv1d.cuh"

constexpr int HALO = WIDTH - 1;
typedef Raw<T, VECTOR> Vector;

// The taps of VECTOR channels and the inputs before the present position, oldest first.
struct Walk {
    float weight[WIDTH][VECTOR], bias[VECTOR], window[HALO][VECTOR];

    __device__ __forceinline__ Vector step(const Params &p, i64 d, const Vector &in, unsigned mask) {
        float now[VECTOR], out[VECTOR];
        in.unpack(now);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            float sum = sum_taps<WIDTH>(
                bias[i], WIDTH, [&](int k) { return weight[k][i]; },
                [&](int k) { return k == HALO ? now[i] : seen(window[k][i], mask, HALO - k); });
            out[i] = MASK && mask & 0x8000 ? 0.0f : finish(sum);
#pragma unroll
            for (int j = 0; j + 1 < HALO; j++) window[j][i] = window[j + 1][i];
            window[HALO - 1][i] = now[i];
        }
        Vector v;
        v.pack(out);
        normalise(p, d, v);
        return v;
    }
};

extern "C" __global__ void __launch_bounds__(128, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    i64 d = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (d >= p.channels) return;
    Walk walk;
#pragma unroll
    for (int i = 0; i < VECTOR; i++) walk.bias[i] = bias_at(p, d + i);
    weights_at(p, d, walk.weight);
    Output output = output_of(p, d);
    int chunk = (int)p.chunk, length = (int)p.length;
    for (i64 b = blockIdx.z; b < p.batch; b += gridDim.z) {
        int t = blockIdx.y * chunk;
        int end = t + chunk < length ? t + chunk : length;
        const S *x = p.x + b * p.x_stride[0] + d + t * p.x_stride[2];
        S *y = output.y + b * output.stride[0] + d + t * output.stride[2];
        const unsigned short *mask = p.mask + b * p.length;

#pragma unroll
        for (int j = 0; j < HALO; j++) {
            Vector v = {};
            if (t - HALO + j >= 0) v.template load<VECTOR>(x + (j - HALO) * p.x_stride[2]);
            v.unpack(walk.window[j]);
        }
        Vector ahead[STEPS];
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (t + s < end) ahead[s].template load<VECTOR>(x);
            x += p.x_stride[2];
        }
#pragma unroll 1
        for (; t + STEPS <= end; t += STEPS) {
#pragma unroll
            for (int s = 0; s < STEPS; s++) {
                Vector in = ahead[s];
                if (t + STEPS + s < end) ahead[s].template load<VECTOR>(x);
                x += p.x_stride[2];
                walk.step(p, d, in, MASK ? mask[t + s] : 0).template store<VECTOR>(y);
                y += output.stride[2];
            }
        }
#pragma unroll
        for (int s = 0; s < STEPS; s++) {
            if (t + s < end) {
                walk.step(p, d, ahead[s], MASK ? mask[t + s] : 0).template store<VECTOR>(y);
                y += output.stride[2];
            }
        }
    }
}
