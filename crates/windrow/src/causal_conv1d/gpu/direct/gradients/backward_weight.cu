// Partial sums of the gradients of weight and bias over `chunk` positions of a row, which column_sum
// adds in order: deterministic. For any strides, width and options. A block takes chunks of
// 128 channels (ALONG_CHANNELS, one thread each) or of one channel (threads along l, added as a tree).
//
// TAPS   taps of a thread, the bias as one more after the last: WIDTH + 1, or 1, and each chunk is
//        taken once for each of them
#include "causal_conv1d.cuh"

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
    wait_for_previous();
    report_boundaries(p);
    i64 width = width_of(p), dilation = dilation_of(p);
    unsigned groups = TAPS == 1 ? (unsigned)width + 1 : 1;
    i64 d = ALONG_CHANNELS ? (i64)blockIdx.x * blockDim.x + threadIdx.x : (i64)blockIdx.x;
    i64 step = ALONG_CHANNELS ? 1 : blockDim.x, begin = ALONG_CHANNELS ? 0 : threadIdx.x;
    i64 chunks = p.chunks;
    bool active = d < p.channels;
    // More rows and chunks than a grid has blocks are taken in turns.
    for (i64 task = blockIdx.y; task < p.batch * chunks * groups; task += gridDim.y) {
        i64 part = task / groups, first = task % groups, row = part / chunks, c = part % chunks;
        i64 start = c * p.chunk;
        i64 end = start + p.chunk < p.length ? start + p.chunk : p.length;
        float sum[TAPS] = {};
        for (i64 t = start + begin; active && t < end; t += step) {
            Sequence s = sequence_at(p, row, t);
            int own = own_number(p, s, t);
            if (own < 0) continue;
            float g = gradient_before_activation(p, s, d, t, own);
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                i64 tap = first + k;
                float in = tap == width ? 1.0f : input_at(p, s, d, t - (width - 1 - tap) * dilation, own);
                sum[k] = fmaf(g, in, sum[k]);
            }
        }
#if !ALONG_CHANNELS
        __shared__ float shared[TAPS][4];
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            for (int distance = 16; distance > 0; distance /= 2) {
                sum[k] += __shfl_xor_sync(0xffffffff, sum[k], distance);
            }
            if (threadIdx.x % 32 == 0) shared[k][threadIdx.x / 32] = sum[k];
        }
        __syncthreads();
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
            sum[k] = (shared[k][0] + shared[k][1]) + (shared[k][2] + shared[k][3]);
        }
        __syncthreads();
        bool writes = active && threadIdx.x == 0;
#else
        bool writes = active;
#endif
        if (writes) {
#pragma unroll
            for (int k = 0; k < TAPS; k++) {
                // Weights first, biases after them.
                i64 tap = first + k;
                i64 column = tap == width ? p.channels * width + d : d * width + tap;
                p.partial[part * p.channels * (width + 1) + column] = sum[k];
            }
        }
    }
}
