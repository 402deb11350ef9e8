// y = act(y + bias) in place, for a dense y: what cuDNN leaves to do.
//
// Constants: ELEMENT_*, EPILOGUE.

#include "conv2d.cuh"

struct Params {
    Element* y;
    const void* bias;
    i64 bias_stride;
    i64 elements;
    i64 run;      // neighbouring elements of one channel
    int channels;
    int bias_is_float;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(256) void KERNEL(const __grid_constant__ Params p) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i >= p.elements) return;
    const i64 channel = i / p.run % p.channels;
    float v = to_float(p.y[i]);
    if (p.bias != nullptr)
        v += p.bias_is_float ? static_cast<const float*>(p.bias)[channel * p.bias_stride]
                             : to_float(static_cast<const Element*>(p.bias)[channel * p.bias_stride]);
    p.y[i] = from_float(epilogue(v));
}
