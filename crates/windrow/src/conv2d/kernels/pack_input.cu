// Copies images of any strides into a channels-last buffer [n, h, w, c_out] whose channels are a whole number of
// 16-byte vectors, zeros beyond c: what the copy engine of winograd_fused.cu can read. With FOLD 3, the three input rows of
// an output row become channels: buffer [n, oh, w, c_out], channel c * 3 + r is row oh + r - pad_h.
//
// f32: also finds the largest finite magnitude of each image, for the scale of split operands.
//
// Constants: ELEMENT_*, FOLD 3 or 1 (rows per channel), CHANNELS_FIRST 1 if neighbouring lanes should read neighbouring columns, else channels.

#include "conv2d.cuh"

constexpr int TILE_C = 32, TILE_P = 64, THREADS = 256;

struct Params {
    const Element* x;
    Element* out;
    u32* x_max;            // [n], zeroed before (f32)
    i64 x_n, x_c, x_h, x_w; // strides in elements
    int n, c, h, w;
    int c_out;             // channels of the buffer
    int rows, pad_h;       // rows of the buffer, padding above
    int pixel_tiles, channel_tiles;
    Divisor w_by;
};

extern "C" __global__ __launch_bounds__(THREADS) void KERNEL(const __grid_constant__ Params p) {
    __shared__ Element tile[TILE_C][TILE_P + 2];
    const int pixels = p.rows * p.w;
    const int channel0 = blockIdx.x % p.channel_tiles * TILE_C;
    const int pixel0 = blockIdx.x / p.channel_tiles % p.pixel_tiles * TILE_P;
    const int image = blockIdx.x / p.channel_tiles / p.pixel_tiles;
#ifdef ELEMENT_F32
    u32 largest = 0;
#endif

    // A thread keeps its pixel or its channel; the other one advances.
    constexpr int STEP = THREADS / (CHANNELS_FIRST ? TILE_P : TILE_C);
#pragma unroll
    for (int i = 0; i < TILE_C * TILE_P / THREADS; i++) {
        const int j = CHANNELS_FIRST ? threadIdx.x / TILE_P + i * STEP : threadIdx.x % TILE_C;
        const int l = CHANNELS_FIRST ? threadIdx.x % TILE_P : threadIdx.x / TILE_C + i * STEP;
        const int channel = channel0 + j, pixel = pixel0 + l;
        if (channel >= p.c_out) break;
        const int c = FOLD == 1 ? channel : channel / FOLD, r = FOLD == 1 ? 0 : channel % FOLD - p.pad_h;
        const int row = p.w_by.divide(pixel), y = row + r, x = pixel - row * p.w;
        Element v = from_float(0);
        if (c < p.c && pixel < pixels && y >= 0 && y < p.h)
            v = p.x[image * p.x_n + c * p.x_c + y * p.x_h + x * p.x_w];
#ifdef ELEMENT_F32
        const u32 bits = __float_as_uint(v) & 0x7fffffff;
        if (bits < 0x7f800000) largest = max(largest, bits);
#endif
        tile[j][l] = v;
    }
    __syncthreads();

    constexpr int VECTOR = 8 / sizeof(Element), LANES = TILE_C / VECTOR; // 8 bytes a thread
    for (int i = threadIdx.x; i < TILE_P * LANES; i += THREADS) {
        const int l = i / LANES, j = i % LANES * VECTOR, pixel = pixel0 + l, channel = channel0 + j;
        if (pixel >= pixels || channel >= p.c_out) continue;
        alignas(8) Element v[VECTOR];
#pragma unroll
        for (int e = 0; e < VECTOR; e++) v[e] = tile[j + e][l];
        *reinterpret_cast<uint2*>(p.out + (static_cast<i64>(image) * pixels + pixel) * p.c_out + channel) =
            *reinterpret_cast<const uint2*>(v);
    }

#ifdef ELEMENT_F32
    __shared__ u32 block_largest;
    if (threadIdx.x == 0) block_largest = 0;
    __syncthreads();
    largest = __reduce_max_sync(~0u, largest);
    if (threadIdx.x % 32 == 0) atomicMax(&block_largest, largest);
    __syncthreads();
    if (threadIdx.x == 0) atomicMax(p.x_max + image, block_largest);
#endif
}
