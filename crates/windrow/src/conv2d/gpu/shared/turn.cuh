// The common part of pack_input.cu and turn_output.cu. Images are transposed between NCHW and channels-last order
// through shared memory. Each thread transposes 16 bytes of channels by four pixels in registers.

#pragma once

#include "conv2d.cuh"

constexpr int CHANNELS = 16 / sizeof(Element); // of one vector in channels-last order
constexpr int PIXELS = 4;                      // of a thread: its block of CHANNELS x PIXELS is transposed in registers
constexpr int CHUNKS = 4, LANES = 32;          // a block has 4 x CHANNELS channels of 32 x PIXELS pixels
constexpr int TILE_P = LANES * PIXELS;

// The place of vector `chunk` of a pixel. The exchange of the last three bits spreads a warp over all banks, both if
// neighbouring lanes have every fourth pixel and if they have neighbouring vectors.
__device__ __forceinline__ int place(int pixel, int chunk) {
    const int i = pixel * CHUNKS + chunk;
    return i ^ (i >> 4 & 7);
}
