// Decoding: y for new positions, from the inputs kept in conv_state, which takes the new ones. One thread per channel
// of a sequence. A block's rows of conv_state lie together in memory, so that its scattered accesses are in the same
// cache lines.
//
#include "update.cuh"

struct Channel {
    const S *x;
    S *state;
    i64 x_step, state_step, state_length;
    // Slot of the first new input in a ring; 0 if the state is no ring.
    i64 head;

    // Input at position t of this call; negative ones are in the state, which holds at least
    // width - 1.
    __device__ __forceinline__ float input(i64 t) const {
        if (t >= 0) return T::to_float(x[t * x_step]);
        i64 k = head + t;
        return T::to_float(state[(k < 0 ? k + state_length : k) * state_step]);
    }
};

extern "C" __global__ void __launch_bounds__(128, 1) KERNEL(const Params p) {
    wait_for_previous();
    i64 d = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (d >= p.channels) return;
    const i64 width = WIDTH ? WIDTH : p.width, history = width - 1;
    float bias = bias_at(p, d);
    const auto tap = [&](i64 k) { return weight_at(p, d, k); };

    for (i64 b = blockIdx.y; b < p.batch; b += gridDim.y) {
        S *y = p.y + b * p.y_stride[0] + d * p.y_stride[1];
        i64 slot = p.state_indices ? p.state_indices[b * p.state_indices_stride] : b;
        if (slot < 0 || slot >= p.pool) {
            // Padding: nothing is computed and no state changes.
            if (slot >= p.pool && d == 0) report(p.wrong, STATE_INDICES, b, slot, p.pool);
            for (i64 t = 0; t < p.length; t++) y[t * p.y_stride[2]] = T::from_float(0.0f);
            continue;
        }
        Channel c;
        c.x = p.x + b * p.x_stride[0] + d * p.x_stride[1];
        c.state = p.state + slot * p.state_stride[0] + d * p.state_stride[1];
        c.x_step = p.x_stride[2], c.state_step = p.state_stride[2];
        c.state_length = p.state_length;
        c.head = 0;
        bool ring = p.cache_seqlens != nullptr && p.state_length > 0;
        if (ring) {
            SEQLENS before = p.cache_seqlens[b * p.cache_seqlens_stride];
            if (before < 0 && d == 0) report(p.wrong, CACHE_SEQLENS, b, before, 0);
            // Without a sign, so that a negative one is held in the state, too.
            bool is_short = sizeof(SEQLENS) == 4 && !(p.state_length >> 32);
            c.head = is_short ? (unsigned)before % (unsigned)p.state_length
                              : (i64)((unsigned long long)before % (unsigned long long)p.state_length);
        }

#if STATE_LENGTH
        if (!ring && p.length == 1) {
            // One step: all loads before the first store, which may go to the same cache line.
            S tokens[STATE_LENGTH + 1];
#pragma unroll
            for (int k = 0; k < STATE_LENGTH; k++) tokens[k] = c.state[k * c.state_step];
            tokens[STATE_LENGTH] = *c.x;
            float sum = sum_taps<WIDTH>(
                bias, WIDTH, tap, [&](int k) { return T::to_float(tokens[STATE_LENGTH + 1 - WIDTH + k]); });
            *y = T::from_float(activate<ACT, true>(sum));
#pragma unroll
            for (int k = 0; k < STATE_LENGTH; k++) c.state[k * c.state_step] = tokens[k + 1];
            continue;
        }
#endif
        for (i64 t = 0; t < p.length; t++) {
            float sum = sum_taps<WIDTH>(bias, width, tap, [&](i64 k) { return c.input(t + k - history); });
            y[t * p.y_stride[2]] = T::from_float(activate<ACT, true>(sum));
        }

        // The state takes the last new inputs: a ring buffer in their slots; otherwise it moves up.
        i64 kept = p.length < p.state_length ? p.length : p.state_length;
        if (ring) {
            i64 k = c.head + (p.length - kept);
            for (i64 t = p.length - kept; t < p.length; t++, k++) {
                while (k >= p.state_length) k -= p.state_length;
                c.state[k * c.state_step] = c.x[t * c.x_step];
            }
        } else {
            for (i64 k = 0; k < p.state_length; k++) {
                i64 t = k - (p.state_length - p.length);
                c.state[k * c.state_step] =
                    t < 0 ? c.state[(k + p.length) * c.state_step] : c.x[t * c.x_step];
            }
        }
    }
}
