// The norm of heads of outputs that another kernel has written.
//
// Floor: the outputs once in and once out, mostly from and to the L2 cache. A thread has 8 neighbouring channels of a
// token, GROUPS threads a head of up to 256 channels. Neighbouring threads have neighbouring channels if
// ALONG_CHANNELS, otherwise neighbouring tokens.
//
// THREADS   of a block
// GROUPS    threads of a head, a power of two; 32 if a head has more than 256 channels
#include "norm.cuh"

struct Params {
    S *y;
    i64 y_stride[3];
    S *further_y[2];
    i64 further_stride[2][3], further_first[2];
    i64 batch, length, norm_channels, head;
    float epsilon;
};
static_assert(PARAMS_AGREE, "as the host's structure");

constexpr int TOKENS = THREADS / GROUPS, CHANNELS = 8;

// The sum over the threads of a head.
__device__ __forceinline__ float sum_of_groups(float sum) {
#if ALONG_CHANNELS
    return sum_of_threads<GROUPS>(sum);
#else
    __shared__ float sums[THREADS];
#pragma unroll
    for (int step = 1; step < GROUPS; step *= 2) {
        sums[threadIdx.x] = sum;
        __syncthreads();
        sum = __fadd_rn(sum, sums[threadIdx.x ^ (step * TOKENS)]);
        __syncthreads();
    }
    return sum;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) KERNEL(const Params p) {
    wait_for_previous();
    int group = ALONG_CHANNELS ? threadIdx.x % GROUPS : threadIdx.x / TOKENS;
    int token = ALONG_CHANNELS ? threadIdx.x / GROUPS : threadIdx.x % TOKENS;
    i64 position = (i64)blockIdx.x * TOKENS + token;
    bool inside = position < p.batch * p.length;
    i64 row = inside ? position / p.length : 0, t = inside ? position % p.length : 0;
    for (i64 d = blockIdx.y * p.head; d < p.norm_channels; d += gridDim.y * p.head) {
        Output out = output_of(p, d);
        S *y = out.y + row * out.stride[0] + d * out.stride[1] + t * out.stride[2];
        float sum = 0.0f;
        for (i64 c = group * CHANNELS; c - group * CHANNELS < p.head; c += NORM_BLOCK) {
            float values[CHANNELS];
#pragma unroll
            for (int i = 0; i < CHANNELS; i++) {
                values[i] = inside && c + i < p.head ? T::to_float(y[(c + i) * out.stride[1]]) : 0.0f;
            }
            sum = __fadd_rn(sum, sum_of_groups(sum_of_squares(values)));
        }
        float factor = norm_factor(sum, p.epsilon);
        if (!inside) continue;
        for (i64 c = group * CHANNELS; c < p.head; c += NORM_BLOCK) {
#pragma unroll
            for (int i = 0; i < CHANNELS; i++) {
                if (c + i >= p.head) break;
                S *at = y + (c + i) * out.stride[1];
                *at = T::from_float(__fmul_rn(T::to_float(*at), factor));
            }
        }
    }
}
