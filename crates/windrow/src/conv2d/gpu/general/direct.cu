// Convolution and its data gradient, one sum per thread, any strides and options: for groups of few channels, where a
// matrix product would mostly multiply zeros.
//
// Constants: ELEMENT_*, TRANSPOSED (the data gradient: reads dy, writes dx), CHANNELS_INNER (neighbouring threads
// compute neighbouring channels, otherwise columns), FRAMES (images are frames of a video), EPILOGUE, RESIDUAL.

#include "conv2d.cuh"

struct Params : ConvShape { // of x and y, or dy and dx
    const Element* filter;
    i64 filter_out, filter_in, filter_r, filter_s; // strides along the channels of y and of x
    i64 elements;            // of y
    int in_group, out_group; // channels of a group in x and y
    int r, s;
    Frames frames;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const i64 index = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= p.elements) return;
    i64 rest = index;
    const auto next = [&](int size) {
        const int at = static_cast<int>(rest % size);
        rest /= size;
        return at;
    };
    int channel, i, j;
    if (CHANNELS_INNER) {
        channel = next(p.k);
        j = next(p.ow);
        i = next(p.oh);
    } else {
        j = next(p.ow);
        i = next(p.oh);
        channel = next(p.k);
    }
    const int group = channel / p.out_group;
    // The filter is [k, c / groups, r, s]: k counts over all groups, c within one.
#if TRANSPOSED
    const Element* filter = p.filter + (channel - group * p.out_group) * p.filter_out +
                            group * static_cast<i64>(p.in_group) * p.filter_in;
#else
    const Element* filter = p.filter + channel * p.filter_out;
#endif
    float sum = 0;
#if FRAMES
    for (int tap = 0; tap < p.frames.kt; tap++, filter += p.frames.filter_t) {
    bool is_initial;
    const Element* image = p.frames.find(p.x, p.frames.number(static_cast<int>(rest), tap), is_initial);
    if (image == nullptr) continue;
    const i64 image_c = is_initial ? p.frames.initial_c : p.x_c, image_h = is_initial ? p.frames.initial_h : p.x_h,
              image_w = is_initial ? p.frames.initial_w : p.x_w;
    image += group * static_cast<i64>(p.in_group) * image_c;
#else
    const Element* image = p.x + rest * p.x_n + group * static_cast<i64>(p.in_group) * p.x_c;
    const i64 &image_c = p.x_c, &image_h = p.x_h, &image_w = p.x_w;
#endif
    for (int r = 0; r < p.r; r++) {
        for (int s = 0; s < p.s; s++) {
#if TRANSPOSED
            int y = i + p.pad_h - r * p.dilation_h, x = j + p.pad_w - s * p.dilation_w;
            if (y < 0 || x < 0 || y % p.stride_h != 0 || x % p.stride_w != 0) continue;
            y /= p.stride_h;
            x /= p.stride_w;
#else
            const int y = i * p.stride_h - p.pad_h + r * p.dilation_h, x = j * p.stride_w - p.pad_w + s * p.dilation_w;
            if (y < 0 || x < 0) continue;
#endif
            if (y >= p.h || x >= p.w) continue;
            for (int c = 0; c < p.in_group; c++)
                sum = fmaf(to_float(image[c * image_c + y * image_h + x * image_w]),
                           to_float(filter[c * p.filter_in + r * p.filter_r + s * p.filter_s]), sum);
        }
    }
#if FRAMES
    }
#endif
    if (p.bias != nullptr)
        sum += p.bias_is_float ? static_cast<const float*>(p.bias)[channel * p.bias_stride]
                               : to_float(static_cast<const Element*>(p.bias)[channel * p.bias_stride]);
    const i64 at = rest * p.y_n + channel * p.y_k + i * p.y_h + j * p.y_w;
    if (RESIDUAL) sum += to_float(p.residual[at]);
    p.y[at] = from_float(epilogue(sum));
}
