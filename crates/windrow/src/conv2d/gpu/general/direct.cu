// Convolution and its data gradient, one sum per thread, any strides and options: for groups of few channels, where a
// matrix product would mostly multiply zeros.
//
// Constants: ELEMENT_*, TRANSPOSED (the data gradient: reads dy, writes dx), CHANNELS_INNER (neighbouring threads
// compute neighbouring channels, else columns), EPILOGUE, RESIDUAL.

#include "conv2d.cuh"

struct Params {
    const Element* image; // x, or dy
    const Element* filter;
    Element* out;         // y, or dx
    const void* bias;
    const Element* residual; // laid out as out
    i64 image_n, image_c, image_h, image_w;
    i64 filter_out, filter_in, filter_r, filter_s; // strides along the channels of `out` and of `image`
    i64 out_n, out_c, out_h, out_w;
    i64 bias_stride;
    i64 elements;         // of out
    int bias_is_float;
    int in_group, out_group; // channels of a group in image and out
    int channels;         // of out
    int h, w;             // of image
    int out_height, out_width;
    int r, s, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
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
        channel = next(p.channels);
        j = next(p.out_width);
        i = next(p.out_height);
    } else {
        j = next(p.out_width);
        i = next(p.out_height);
        channel = next(p.channels);
    }
    const int group = channel / p.out_group;
    const Element* image = p.image + rest * p.image_n + group * static_cast<i64>(p.in_group) * p.image_c;
    // The filter is [k, c / groups, r, s]: k counts over all groups, c within one.
#if TRANSPOSED
    const Element* filter = p.filter + (channel - group * p.out_group) * p.filter_out +
                            group * static_cast<i64>(p.in_group) * p.filter_in;
#else
    const Element* filter = p.filter + channel * p.filter_out;
#endif
    float sum = 0;
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
                sum = fmaf(to_float(image[c * p.image_c + y * p.image_h + x * p.image_w]),
                           to_float(filter[c * p.filter_in + r * p.filter_r + s * p.filter_s]), sum);
        }
    }
    if (p.bias != nullptr)
        sum += p.bias_is_float ? static_cast<const float*>(p.bias)[channel * p.bias_stride]
                               : to_float(static_cast<const Element*>(p.bias)[channel * p.bias_stride]);
    const i64 at = rest * p.out_n + channel * p.out_c + i * p.out_h + j * p.out_w;
    if (RESIDUAL) sum += to_float(p.residual[at]);
    p.out[at] = from_float(epilogue(sum));
}
