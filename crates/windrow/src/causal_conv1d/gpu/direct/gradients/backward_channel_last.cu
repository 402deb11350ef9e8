// dx and partial sums of the gradients of weight and bias where channels lie next to each other in x,
// dy and dx (stride 1 along d), 2 <= WIDTH <= 5, all addresses aligned to VECTOR elements.
//
// Floor: x and dy once in, dx once out. A thread takes VECTOR channels and walks along `chunk`
// positions and WIDTH - 1 more, with the last WIDTH - 1 inputs and gradients in registers: dx follows
// WIDTH - 1 positions behind. The warps of a block walk along neighbouring chunks and add their sums.
//
// MASK     take sequences from the mask; there are no states then
// VECTOR   channels of a thread
// AHEAD    loads of x and dy that are on their way, each
// DX       whether dx is wanted
#include "backward_walk.cuh"

constexpr int WARPS = 4, SUMS = VECTOR * (WIDTH + 1);

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) KERNEL(const Params p) {
    wait_for_previous();
    __shared__ float shared[WARPS][32 * SUMS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    i64 first = (i64)blockIdx.x * 32 * VECTOR, d = first + lane * VECTOR, b = blockIdx.z;
    int length = (int)p.length, chunk = (int)p.chunk;
    int begin = (blockIdx.y * WARPS + warp) * chunk;
    int end = begin + chunk < length ? begin + chunk : length;
    Walk walk = {};
    if (d < p.channels && begin < end) {
        const S *x = p.x + b * p.x_stride[0] + d + begin * p.x_stride[2];
        const S *dy = p.dy + b * p.dy_stride[0] + d + begin * p.dy_stride[2];
        S *dx = DX ? p.dx + b * p.dx_stride[0] + d + (begin - HALO) * p.dx_stride[2] : nullptr;
        const unsigned short *mask = p.mask + b * p.length;
        Vector xs[AHEAD], dys[AHEAD];
#pragma unroll
        for (int s = 0; s < AHEAD; s++) {
            xs[s] = {}, dys[s] = {};
            if (begin + s < length) {
                xs[s].template load<VECTOR>(x);
                dys[s].template load<VECTOR>(dy);
            }
            x += p.x_stride[2], dy += p.dy_stride[2];
        }
        Sequence sequence = sequence_of_index(p, b);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) walk.bias[i] = bias_at(p, d + i);
        weights_at(p, d, walk.weight);
#pragma unroll
        for (int j = 0; j < HALO; j++) {
            int t = begin - HALO + j;
#pragma unroll
            for (int i = 0; i < VECTOR; i++) {
                float v = 0.0f;
                // With a mask, the inputs as they are: each position's word selects those on which it depends.
                if (MASK && t >= 0) {
                    v = T::to_float(p.x[b * p.x_stride[0] + d + i + t * p.x_stride[2]]);
                } else if (!MASK) {
                    v = input_at(p, sequence, d + i, t, 0);
                }
                walk.window[j][i] = v;
            }
        }
#pragma unroll 1
        for (int t = begin; t < end + HALO; t += AHEAD) {
#pragma unroll
            for (int s = 0; s < AHEAD; s++) {
                int now = t + s;
                Vector in = xs[s], g = dys[s];
                xs[s] = {}, dys[s] = {};
                if (now + AHEAD < length && now + AHEAD < end + HALO) {
                    xs[s].template load<VECTOR>(x);
                    dys[s].template load<VECTOR>(dy);
                }
                x += p.x_stride[2], dy += p.dy_stride[2];
                unsigned m = MASK && now < length ? mask[now] : 0;
                float out[VECTOR];
                walk.step(in, g, m, now < end, out);
                if (DX) {
                    int t = now - HALO;
                    // Steps go in groups: the last ones lie after all positions.
                    if (!MASK && p.dfinal_states && now >= length && t < end) {
#pragma unroll
                        for (int i = 0; i < VECTOR; i++) {
                            out[i] += final_gradient(p, sequence, d + i, now - length);
                        }
                    }
                    if (t >= begin && t < end) {
                        Vector v;
                        v.pack(out);
                        v.template store<VECTOR>(dx);
                    }
                    dx += p.dx_stride[2];
                }
            }
        }
    }
    // Weights of a channel together, biases after all weights.
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        int channel = lane * VECTOR + i;
#pragma unroll
        for (int k = 0; k < WIDTH; k++) shared[warp][channel * WIDTH + k] = walk.sum[k][i];
        shared[warp][32 * VECTOR * WIDTH + channel] = walk.sum[WIDTH][i];
    }
    __syncthreads();
    float *partial = p.partial + (b * p.chunks + blockIdx.y) * p.channels * (WIDTH + 1);
    for (int i = threadIdx.x; i < 32 * SUMS; i += blockDim.x) {
        bool is_bias = i >= 32 * VECTOR * WIDTH;
        int at = is_bias ? i - 32 * VECTOR * WIDTH : i;
        i64 channel = first + (is_bias ? at : at / WIDTH);
        if (channel >= p.channels) continue;
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += shared[w][i];
        partial[is_bias ? p.channels * WIDTH + channel : first * WIDTH + at] = sum;
    }
}
