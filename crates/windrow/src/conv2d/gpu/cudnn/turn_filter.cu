// Transposes a dense filter [k, c, taps] to [k, taps, c]. Output channels that have not changed since the filter was
// last packed are skipped.
//
// Constants: ELEMENT_*.

#include "conv2d.cuh"

constexpr int VECTOR = 16 / sizeof(Element), SHARED = 1024; // vectors of the tile
constexpr int THREADS = 256;

struct Params {
    const Element* w;
    Element* packed;
    Seen seen;
    int c, taps;
    int chunk; // input channels that the tile holds
};
static_assert(PARAMS_AGREE, "as the host's structure");

// One block for each output channel.
extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    __shared__ uint4 tile[SHARED];
    Element* const elements = reinterpret_cast<Element*>(tile);
    const int terms = p.c * p.taps;
    const Element* const w = p.w + static_cast<i64>(blockIdx.x) * terms;
    Digest digest;
    if (p.seen.digests != nullptr) {
#pragma unroll 4
        for (int term = 4 * threadIdx.x; term < terms; term += 4 * THREADS) {
            Element v[4];
#pragma unroll
            for (int i = 0; i < 4; i++) v[i] = term + i < terms ? w[term + i] : from_float(0);
            digest.add(p.seen, term, v);
        }
    }
    if (digest.is_known(p.seen, blockIdx.x)) return;

    Element* const packed = p.packed + static_cast<i64>(blockIdx.x) * terms;
    const bool whole = p.c % VECTOR == 0 && reinterpret_cast<u64>(w) % 16 == 0;
#pragma unroll 1
    for (int c0 = 0; c0 < p.c; c0 += p.chunk) {
        const int channels = min(p.chunk, p.c - c0), count = channels * p.taps;
        const Element* const from = w + c0 * p.taps;
        __syncthreads();
        if (whole) {
            const uint4* const vectors = reinterpret_cast<const uint4*>(from);
#pragma unroll 4
            for (int i = threadIdx.x; i < count / VECTOR; i += THREADS) tile[i] = vectors[i];
        } else {
#pragma unroll 4
            for (int i = threadIdx.x; i < count; i += THREADS) elements[i] = from[i];
        }
        __syncthreads();
        if (whole) {
            const int of_tap = channels / VECTOR;
            for (int i = threadIdx.x; i < count / VECTOR; i += THREADS) {
                const int tap = i / of_tap, c = (i - tap * of_tap) * VECTOR;
                float v[VECTOR];
#pragma unroll
                for (int j = 0; j < VECTOR; j++) v[j] = to_float(elements[(c + j) * p.taps + tap]);
                store_vector(packed + (tap * p.c + c0 + c), v);
            }
        } else {
            for (int i = threadIdx.x; i < count; i += THREADS) {
                const int tap = i / channels, c = i - tap * channels;
                packed[tap * p.c + c0 + c] = elements[c * p.taps + tap];
            }
        }
    }
    digest.keep(p.seen, blockIdx.x);
}
