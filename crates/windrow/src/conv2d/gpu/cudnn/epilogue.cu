// y = act(y + bias + residual) in place, for a dense y: the pass after cuDNN's kernel. A thread takes VECTOR_BYTES of
// each tensor.
//
// Constants: ELEMENT_*, EPILOGUE, RESIDUAL, VECTOR_BYTES.

#include "conv2d.cuh"

constexpr int VECTOR = VECTOR_BYTES / sizeof(Element);
typedef Raw<T, VECTOR> Vector;

struct Params : Output {
    int elements;
    Divisor run; // neighbouring elements of one channel
    Divisor channels;
};
static_assert(PARAMS_AGREE, "as the host's structure");

__device__ __forceinline__ float bias_of(const Params& p, int element) {
    const int channels = p.run.divide(element);
    const i64 at = (channels - p.channels.divide(channels) * static_cast<int>(p.channels.value)) * p.bias_stride;
    return p.bias_is_float ? static_cast<const float*>(p.bias)[at] : to_float(static_cast<const Element*>(p.bias)[at]);
}

// A vector, or its part that exists.
struct Place {
    int exist;

    __device__ __forceinline__ bool is_whole(const Element* at) const {
        return exist >= VECTOR && reinterpret_cast<u64>(at) % VECTOR_BYTES == 0;
    }
    __device__ __forceinline__ void load(Vector& v, const Element* from) const {
        if (is_whole(from)) {
            v.template load<VECTOR>(from);
            return;
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++) v.set_stored(i, i < exist ? from[i] : from_float(0));
    }
    __device__ __forceinline__ void store(const Vector& v, Element* to) const {
        if (is_whole(to)) {
            v.template store<VECTOR>(to);
            return;
        }
#pragma unroll
        for (int i = 0; i < VECTOR; i++)
            if (i < exist) to[i] = v.stored(i);
    }
};

extern "C" __global__ __launch_bounds__(256) void KERNEL(const __grid_constant__ Params p) {
    const i64 first = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VECTOR;
    if (first >= p.elements) return;
    const Place place = {p.elements - static_cast<int>(first)};
    Vector sums, added;
    place.load(sums, p.y + first);
    if (RESIDUAL) place.load(added, p.residual + first);
    float v[VECTOR];
#pragma unroll
    for (int i = 0; i < VECTOR; i++) {
        v[i] = sums.get(i);
        if (p.bias != nullptr && i < place.exist) v[i] += bias_of(p, static_cast<int>(first) + i);
        if (RESIDUAL) v[i] += added.get(i);
        v[i] = epilogue(v[i]);
    }
    sums.pack(v);
    place.store(sums, p.y + first);
}
