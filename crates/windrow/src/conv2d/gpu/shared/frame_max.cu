// The largest of the maxima of the frames that each image of y reads: the numbers that scale its f32 operands.
//
// Constants: ELEMENT_F32.

#include "conv2d.cuh"

struct Params {
    const u32* of_frames; // of the initial frames, then of x: bits of the largest finite magnitude of each
    u32* of_images;       // [n]
    int n;
    Frames frames;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const int image = blockIdx.x * blockDim.x + threadIdx.x;
    if (image >= p.n) return;
    const Frames& f = p.frames;
    u32 largest = 0;
    for (int tap = 0; tap < f.kt; tap++) {
        const int number = f.repeats ? max(f.number(image, tap), 0) : f.number(image, tap);
        if (number >= -f.initial_count && number < f.t) largest = max(largest, p.of_frames[f.initial_count + number]);
    }
    p.of_images[image] = largest;
}
