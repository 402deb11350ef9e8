// The products of group_products.cu: the order of a packed filter, which is operand B.
//
// Constants: ELEMENT_*, TF32 1 for f32; GROUP_C, GROUP_K: channels of a group, multiples of 8; FILTER_H, FILTER_W.
#pragma once

#include "conv2d.cuh"

constexpr int TAPS = FILTER_H * FILTER_W;
constexpr int DEPTH = IS_F32 ? 8 : 16; // input channels of a product
// Products of a tap: whole ones, and one of 8 channels where the last one is not whole.
constexpr int WHOLE_STEPS = GROUP_C / DEPTH;
constexpr int STEPS = (GROUP_C + DEPTH - 1) / DEPTH;
constexpr int K_TILES = GROUP_K / 8; // of 8 output channels

// The output channel of a group that is column `column` of a tile. Two tiles share 16 channels, so that the sums of a
// lane for one pixel, which are two neighbouring columns of each, are four neighbouring channels.
__device__ __forceinline__ int channel_of(int tile, int column) {
    if (tile == K_TILES - 1 && K_TILES % 2 == 1) return tile * 8 + column;
    return tile / 2 * 16 + column / 2 * 4 + tile % 2 * 2 + column % 2;
}
