// Copies images of any strides into a channels-last buffer [n, h, w, c_out] whose channels are a whole number of
// 16-byte vectors, with zeros beyond c. The copy engine of winograd_row.cu can read it.
//
// f32: also finds the largest finite magnitude of each image, for the scale of split operands, if that is asked for.
//
// Constants: ELEMENT_*, VECTOR: 4 if the pixels of a channel are contiguous and can be read in aligned fours, otherwise
// 1.

#include "turn.cuh"

struct Params {
    const Element* x;
    Element* out;
    u32* x_max;             // [n], zeroed before (f32); or null
    i64 x_n, x_c, x_h, x_w; // strides in elements
    int n, c, h, w;
    int c_out;              // channels of the buffer
    int pixel_tiles, channel_tiles;
    Divisor w_by;
};
static_assert(PARAMS_AGREE, "as the host's structure");

// Pixels `pixel` and following of a channel, zero where there are none.
__device__ __forceinline__ void load(Element (&v)[PIXELS], const Params& p, const Element* image, int c, int pixel) {
    const int pixels = p.h * p.w;
    if (VECTOR == PIXELS) {
        Raw<T, PIXELS> raw = {};
        if (c < p.c && pixel < pixels) raw.template load<PIXELS>(image + c * p.x_c + pixel);
#pragma unroll
        for (int i = 0; i < PIXELS; i++) v[i] = raw.stored(i);
    } else {
#pragma unroll
        for (int i = 0; i < PIXELS; i++) {
            const int row = p.w_by.divide(pixel + i), column = pixel + i - row * p.w;
            v[i] = c < p.c && pixel + i < pixels ? image[c * p.x_c + row * p.x_h + column * p.x_w] : from_float(0);
        }
    }
}

extern "C" __global__ __launch_bounds__(CHUNKS * LANES) void KERNEL(const __grid_constant__ Params p) {
    __shared__ uint4 tile[TILE_P * CHUNKS];
    const int channel0 = blockIdx.x % p.channel_tiles * (CHUNKS * CHANNELS);
    const int pixel0 = blockIdx.x / p.channel_tiles % p.pixel_tiles * TILE_P;
    const int image = blockIdx.x / p.channel_tiles / p.pixel_tiles;
    {
        const int chunk = threadIdx.x / LANES, lane = threadIdx.x % LANES;
        Element v[CHANNELS][PIXELS];
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
            load(v[c], p, p.x + image * p.x_n, channel0 + chunk * CHANNELS + c, pixel0 + lane * PIXELS);
#pragma unroll
        for (int i = 0; i < PIXELS; i++) {
            u32 words[4];
#pragma unroll
            for (int j = 0; j < 4; j++) {
#ifdef ELEMENT_F32
                words[j] = __float_as_uint(v[j][i]);
#else
                words[j] = static_cast<u32>(v[2 * j][i]) | static_cast<u32>(v[2 * j + 1][i]) << 16;
#endif
            }
            tile[place(lane * PIXELS + i, chunk)] = make_uint4(words[0], words[1], words[2], words[3]);
        }
#ifdef ELEMENT_F32
        u32 largest = 0;
#pragma unroll
        for (int c = 0; c < CHANNELS; c++)
#pragma unroll
            for (int i = 0; i < PIXELS; i++) largest = max(largest, finite_magnitude(v[c][i]));
        if (p.x_max != nullptr) store_largest(p.x_max + image, largest);
#endif
    }
    __syncthreads();
    Element* const out = p.out + static_cast<i64>(image) * p.h * p.w * p.c_out;
#pragma unroll
    for (int i = 0; i < PIXELS; i++) {
        const int index = i * (CHUNKS * LANES) + threadIdx.x, chunk = index % CHUNKS;
        const int pixel = pixel0 + index / CHUNKS, channel = channel0 + chunk * CHANNELS;
        if (pixel < p.h * p.w && channel < p.c_out)
            *reinterpret_cast<uint4*>(out + static_cast<i64>(pixel) * p.c_out + channel) =
                tile[place(index / CHUNKS, chunk)];
    }
}
