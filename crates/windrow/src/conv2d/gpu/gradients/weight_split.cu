// Splits an f32 tensor into f16 parts, in the order of weight_product.cu. Matrix rows are pixels, image row after image
// row. A plane has the image rows and columns with one remainder modulo the stride. So a tap reads one plane, at a
// constant offset. Between image rows and between images there are zeros for the padding. If there are few channels,
// the taps of a row of the filter are folded into channels, and columns are those of dy.
//
// Constants: ELEMENT_F32, FOLDED 0 or 1; CHANNELS_INNER 0 or 1: whether channels are neighbours; VECTOR: 4 if they are
// whole, aligned vectors, otherwise 1; EXPONENT, SHRINKAGE.

#include "conv2d.cuh"

constexpr int THREADS = 256;
constexpr int OCTETS = CHANNELS_INNER ? 4 : 1; // of neighbouring threads

struct Params {
    const float* x;
    u16* high;                // [plane][octet][rows][8]
    const u32* max;           // bits of the largest finite magnitude
    i64 low;                  // elements from the high parts to the low ones
    i64 x_n, x_c, x_h, x_w;   // strides in elements
    int n, c, h, w;
    int pad_h, pad_w, stride_h, stride_w, dilation_h, dilation_w;
    int octets, rows;
    Divisor fold;             // channels of a tap
    Divisor pitch, height;    // columns and rows of an image in a plane
    Divisor planes_w;
};
static_assert(PARAMS_AGREE, "as the host's structure");

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    const int row = blockIdx.x * (THREADS / OCTETS) + threadIdx.x / OCTETS;
    const int octet = blockIdx.y * OCTETS + threadIdx.x % OCTETS, plane = blockIdx.z;
    if (row >= p.rows || octet >= p.octets) return;
    const int plane_h = p.planes_w.divide(plane), plane_w = plane - plane_h * static_cast<int>(p.planes_w.value);
    const int line = p.pitch.divide(row), image = p.height.divide(line);
    const int y = (line - image * static_cast<int>(p.height.value)) * p.stride_h + plane_h * p.dilation_h % p.stride_h -
                  p.pad_h;
    const int x = (row - line * static_cast<int>(p.pitch.value)) * p.stride_w + plane_w * p.dilation_w % p.stride_w - p.pad_w;
    float v[8] = {};
    const auto in_row = [&](int x) { return static_cast<u32>(x) < static_cast<u32>(p.w); };
    if (image < p.n && static_cast<u32>(y) < static_cast<u32>(p.h) && (FOLDED || in_row(x))) {
        const float* const from = p.x + (image * p.x_n + 8 * octet * p.x_c + y * p.x_h + x * p.x_w);
        const int count = p.c - 8 * octet;
        if (FOLDED) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int channel = 8 * octet + i, s = p.fold.divide(channel), at = x + s * p.dilation_w;
                if (i < count && in_row(at))
                    v[i] = p.x[image * p.x_n + (channel - s * static_cast<int>(p.fold.value)) * p.x_c + y * p.x_h + at * p.x_w];
            }
        } else if (VECTOR == 4) {
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                if (i >= count) break;
                const float4 part = *reinterpret_cast<const float4*>(from + i);
                v[i] = part.x, v[i + 1] = part.y, v[i + 2] = part.z, v[i + 3] = part.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (i < count) v[i] = from[i * p.x_c];
        }
    }
    const float scale = power_of_two_scale(*p.max, EXPONENT);
    u32 high[4], low[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float a = v[2 * i] * scale, b = v[2 * i + 1] * scale;
        high[i] = floats_to_f16x2(a, b);
        const float2 rounded = unpack_f16x2(high[i]);
        low[i] = floats_to_f16x2(fmaf(a, SHRINKAGE, a - rounded.x), fmaf(b, SHRINKAGE, b - rounded.y));
    }
    u16* const to = p.high + ((static_cast<i64>(plane) * p.octets + octet) * p.rows + row) * 8;
    *reinterpret_cast<uint4*>(to) = make_uint4(high[0], high[1], high[2], high[3]);
    *reinterpret_cast<uint4*>(to + p.low) = make_uint4(low[0], low[1], low[2], low[3]);
}
