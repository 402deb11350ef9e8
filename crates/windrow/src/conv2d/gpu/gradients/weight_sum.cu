// Adds the parts of a weight gradient of weight_product.cu in a fixed order, with compensation, and stores it with any
// strides. If an operand is infinite, its f16 parts are infinity and NaN, and their products with the zeros between
// rows and images are NaN. So elements that would be NaN are summed again in f32, by all lanes of their warp.
//
// Constants: ELEMENT_F32.

#include "conv2d.cuh"

struct Params {
    const float* parts;   // [parts][k, r, s, c]
    float* out;
    const float* x;
    const float* dy;
    i64 k_stride, c_stride, r_stride, s_stride;
    i64 x_n, x_c, x_h, x_w;
    i64 dy_n, dy_k, dy_h, dy_w;
    i64 elements;         // of one part
    int parts_count;
    int c, r, s, h, w;
    int stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
    int pixels;           // n * oh * ow
    Divisor image_pixels, ow;
};
static_assert(PARAMS_AGREE, "as the host's structure");

struct Place {
    int k, c, r, s;
    __device__ __forceinline__ Place(const Params& p, i64 i) {
        c = static_cast<int>(i % p.c);
        s = static_cast<int>(i / p.c % p.s);
        r = static_cast<int>(i / p.c / p.s % p.r);
        k = static_cast<int>(i / p.c / p.s / p.r);
    }
};

// The same in all lanes.
__device__ float plain_sum(const Params& p, const Place& at) {
    float sum = 0;
    for (int pixel = threadIdx.x % 32; pixel < p.pixels; pixel += 32) {
        const int image = p.image_pixels.divide(pixel), rest = pixel - image * static_cast<int>(p.image_pixels.value);
        const int row = p.ow.divide(rest), column = rest - row * static_cast<int>(p.ow.value);
        const int y = row * p.stride_h - p.pad_h + at.r * p.dilation_h, x = column * p.stride_w - p.pad_w + at.s * p.dilation_w;
        if (static_cast<u32>(y) >= static_cast<u32>(p.h) || static_cast<u32>(x) >= static_cast<u32>(p.w)) continue;
        sum = fmaf(p.x[image * p.x_n + at.c * p.x_c + y * p.x_h + x * p.x_w],
                   p.dy[image * p.dy_n + at.k * p.dy_k + row * p.dy_h + column * p.dy_w], sum);
    }
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    return sum;
}

extern "C" __global__ void KERNEL(const __grid_constant__ Params p) {
    const i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    float sum = 0, lost = 0;
    for (int part = 0; part < p.parts_count && i < p.elements; part++) {
        const float term = p.parts[part * p.elements + i], next = sum + term, kept = next - sum;
        lost += (sum - (next - kept)) + (term - kept);
        sum = next;
    }
    // Infinite sums have no error worth adding.
    if (isfinite(lost)) sum += lost;
    for (u32 left = __ballot_sync(~0u, sum != sum); left != 0; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        const float plain = plain_sum(p, Place(p, i - threadIdx.x % 32 + lane));
        if (threadIdx.x % 32 == lane) sum = plain;
    }
    if (i >= p.elements) return;
    const Place at(p, i);
    p.out[at.k * p.k_stride + at.c * p.c_stride + at.r * p.r_stride + at.s * p.s_stride] = sum;
}
