// Decoding by one position where channels lie next to each other in x and y and all taps and inputs of
// neighbouring channels do in weight and conv_state, or channels do there as well; no ring.
//
// Floor: states once in and once out, x once in, y once out. A thread takes VECTOR channels of a sequence,
// all of whose loads are on their way before the first use.
//
// VECTOR            channels of a thread
// ALONG_CHANNELS    channels lie next to each other in conv_state; else the inputs of a channel do
#include "update.cuh"

extern "C" __global__ void __launch_bounds__(128) KERNEL(const Params p) {
    wait_for_previous();
    i64 d = ((i64)blockIdx.x * blockDim.x + threadIdx.x) * VECTOR;
    if (d >= p.channels) return;
    for (i64 b = blockIdx.y; b < p.batch; b += gridDim.y) {
        i64 slot = p.state_indices ? p.state_indices[b * p.state_indices_stride] : b;
        Raw<T, VECTOR> x, y = {};
        x.template load<VECTOR>(p.x + b * p.x_stride[0] + d);
        S *out = p.y + b * p.y_stride[0] + d;
        if (slot < 0 || slot >= p.pool) {
            // Padding: nothing is computed and no state changes.
            if (slot >= p.pool && d == 0) report(p.wrong, STATE_INDICES, b, slot, p.pool);
            y.template store<VECTOR>(out);
            continue;
        }
        S *state = p.state + slot * p.state_stride[0] + d * p.state_stride[1];
        S tokens[VECTOR][STATE_LENGTH + 1];
        Raw<T, VECTOR * STATE_LENGTH> all;
        if (ALONG_CHANNELS) {
#pragma unroll
            for (int k = 0; k < STATE_LENGTH; k++) {
                Raw<T, VECTOR> row;
                row.template load<VECTOR>(state + k * p.state_stride[2]);
#pragma unroll
                for (int i = 0; i < VECTOR; i++) tokens[i][k] = row.stored(i);
            }
        } else {
            all.template load<VECTOR>(state);
#pragma unroll
            for (int i = 0; i < VECTOR * STATE_LENGTH; i++) {
                tokens[i / STATE_LENGTH][i % STATE_LENGTH] = all.stored(i);
            }
        }
        float weight[WIDTH][VECTOR], sum[VECTOR];
        weights_at(p, d, weight);
#pragma unroll
        for (int i = 0; i < VECTOR; i++) {
            tokens[i][STATE_LENGTH] = x.stored(i);
            float of_taps = sum_taps<WIDTH>(
                bias_at(p, d + i), WIDTH, [&](int k) { return weight[k][i]; },
                [&](int k) { return T::to_float(tokens[i][STATE_LENGTH + 1 - WIDTH + k]); });
            sum[i] = activate<ACT, true>(of_taps);
        }
        y.pack(sum);
        y.template store<VECTOR>(out);
        if (ALONG_CHANNELS) {
#pragma unroll
            for (int k = 0; k < STATE_LENGTH; k++) {
                Raw<T, VECTOR> row;
#pragma unroll
                for (int i = 0; i < VECTOR; i++) row.set_stored(i, tokens[i][k + 1]);
                row.template store<VECTOR>(state + k * p.state_stride[2]);
            }
        } else {
#pragma unroll
            for (int i = 0; i < VECTOR * STATE_LENGTH; i++) {
                all.set_stored(i, tokens[i / STATE_LENGTH][i % STATE_LENGTH + 1]);
            }
            all.template store<VECTOR>(state);
        }
    }
}
