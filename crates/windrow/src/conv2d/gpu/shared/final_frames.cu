// The state after a chunk of a causal convolution of videos: the last frames of x and of the frames before it, exact
// copies. They may replace the initial frames in memory: a thread reads each of its pixel's frames before it writes there.
//
// Constants: ELEMENT_*, CHANNELS_INNER (neighbouring threads have neighbouring channels, otherwise columns).

#include "conv2d.cuh"

struct Params {
    const Element* x;
    Element* to;
    i64 x_n, x_c, x_h, x_w; // strides in elements
    i64 to_n, to_c, to_t, to_h, to_w;
    i64 initial_n;
    i64 elements; // of a frame of all videos
    int c, h, w;
    Frames frames;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= p.elements) return;
    i64 n = index;
    const auto next = [&](int size) {
        const int at = static_cast<int>(n % size);
        n /= size;
        return at;
    };
    int c, i, j;
    if (CHANNELS_INNER) {
        c = next(p.c);
        j = next(p.w);
        i = next(p.h);
    } else {
        j = next(p.w);
        i = next(p.h);
        c = next(p.c);
    }
    const Frames& f = p.frames;
    const Element* const x = p.x + (n * p.x_n + c * p.x_c + i * p.x_h + j * p.x_w);
    const i64 in_initial = n * p.initial_n + c * f.initial_c + i * f.initial_h + j * f.initial_w;
    Element* const to = p.to + (n * p.to_n + c * p.to_c + i * p.to_h + j * p.to_w);
    for (int k = 0; k < f.padding; k++) {
        bool is_initial;
        const Element* const from = f.find(x, f.t + k - f.padding, is_initial);
        to[k * p.to_t] = from == nullptr ? from_float(0) : is_initial ? from[in_initial] : *from;
    }
}
